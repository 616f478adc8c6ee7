/* System calls that fail on purpose, and a wall clock that jumps: preload this into a process and arm it from inside.

       gcc -shared -fPIC -O1 -o faults.so syscall_faults.c -ldl        LD_PRELOAD=faults.so program

   faults_arm(prefix, mask, at, times, error, how): of the calls in `mask` on paths below `prefix`, the at-th (from 0)
   and the times-1 after it (times < 0: all) go wrong: how 0 nothing happened and errno is `error`; 1 it happened and
   errno is `error` all the same; 2 a write is short (half of it), other calls pass. faults_seen() counts the calls,
   faults_fired() those that went wrong. faults_clock(ns) moves CLOCK_REALTIME.

   The bits of `mask`, in the order of enum call below. A disarmed library only passes calls on. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum call { OPEN, WRITE, PWRITE, READ, FDATASYNC, FSYNC, LINK, RENAME, FTRUNCATE, MMAP, FALLOCATE, MKDIR, UNLINK };

static char prefix[PATH_MAX];
static unsigned armed;
static long first, times_;
static int error_, how_;
static atomic_long seen, fired;
static atomic_llong clock_offset;

void faults_arm(const char *path, unsigned mask, long at, long times, int error, int how)
{
    armed = 0;
    snprintf(prefix, sizeof prefix, "%s", path);
    first = at;
    times_ = times;
    error_ = error;
    how_ = how;
    atomic_store(&seen, 0);
    atomic_store(&fired, 0);
    armed = mask;
}

void faults_disarm(void) { armed = 0; }
long faults_seen(void) { return seen; }
long faults_fired(void) { return fired; }
void faults_clock(long long ns) { clock_offset = ns; }

enum fate { PASS, FAIL, FAIL_AFTER, SHORT };

static enum fate fate_of(enum call call, const char *path)
{
    if (!(armed & (1u << call)) || path == NULL || strncmp(path, prefix, strlen(prefix)) != 0)
        return PASS;
    long n = atomic_fetch_add(&seen, 1);
    if (n < first || (times_ >= 0 && n >= first + times_))
        return PASS;
    if (how_ == 2 && call != WRITE && call != PWRITE)
        return PASS;
    atomic_fetch_add(&fired, 1);
    return how_ == 2 ? SHORT : how_ == 1 ? FAIL_AFTER : FAIL;
}

static enum fate fate_of_fd(enum call call, int fd)
{
    char link[64], path[PATH_MAX];
    if (!(armed & (1u << call)) || fd < 0)
        return PASS;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlink, link, path, sizeof path - 1);
    if (n < 0)
        return PASS;
    path[n] = 0;
    return fate_of(call, path);
}

#define REAL(type, name, ...)                                    \
    static type (*real)(__VA_ARGS__);                            \
    if (!real)                                                   \
        real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

/* A call that returns an int or a count and sets errno. */
#define WRAP(drawn, expression)                                  \
    do {                                                         \
        enum fate what = (drawn);                                \
        if (what == FAIL) {                                      \
            errno = error_;                                      \
            return -1;                                           \
        }                                                        \
        __auto_type result = (expression);                       \
        if (what == FAIL_AFTER && result >= 0) {                 \
            errno = error_;                                      \
            return -1;                                           \
        }                                                        \
        return result;                                           \
    } while (0)

#define DEFINE_OPEN(name)                                        \
    int name(const char *path, int flags, ...)                   \
    {                                                            \
        va_list list;                                            \
        va_start(list, flags);                                   \
        mode_t mode = va_arg(list, mode_t);                      \
        va_end(list);                                            \
        REAL(int, #name, const char *, int, mode_t);             \
        if (fate_of(OPEN, path) != PASS) {                       \
            errno = error_;                                      \
            return -1;                                           \
        }                                                        \
        return real(path, flags, mode);                          \
    }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)

ssize_t write(int fd, const void *data, size_t size)
{
    REAL(ssize_t, "write", int, const void *, size_t);
    enum fate f = fate_of_fd(WRITE, fd);
    if (f == SHORT)
        return real(fd, data, size > 1 ? size / 2 : size);
    WRAP(f, real(fd, data, size));
}

#define DEFINE_PWRITE(name, offset)                                       \
    ssize_t name(int fd, const void *data, size_t size, offset at)        \
    {                                                                     \
        REAL(ssize_t, #name, int, const void *, size_t, offset);          \
        enum fate f = fate_of_fd(PWRITE, fd);                             \
        if (f == SHORT)                                                   \
            return real(fd, data, size > 1 ? size / 2 : size, at);        \
        WRAP(f, real(fd, data, size, at));                                \
    }
DEFINE_PWRITE(pwrite, off_t)
DEFINE_PWRITE(pwrite64, off64_t)

ssize_t read(int fd, void *data, size_t size)
{
    REAL(ssize_t, "read", int, void *, size_t);
    WRAP(fate_of_fd(READ, fd), real(fd, data, size));
}

#define DEFINE_PREAD(name, offset)                                        \
    ssize_t name(int fd, void *data, size_t size, offset at)              \
    {                                                                     \
        REAL(ssize_t, #name, int, void *, size_t, offset);                \
        WRAP(fate_of_fd(READ, fd), real(fd, data, size, at));             \
    }
DEFINE_PREAD(pread, off_t)
DEFINE_PREAD(pread64, off64_t)

int fdatasync(int fd)
{
    REAL(int, "fdatasync", int);
    WRAP(fate_of_fd(FDATASYNC, fd), real(fd));
}

int fsync(int fd)
{
    REAL(int, "fsync", int);
    WRAP(fate_of_fd(FSYNC, fd), real(fd));
}

#define DEFINE_FTRUNCATE(name, offset)                                    \
    int name(int fd, offset size)                                         \
    {                                                                     \
        REAL(int, #name, int, offset);                                    \
        WRAP(fate_of_fd(FTRUNCATE, fd), real(fd, size));                  \
    }
DEFINE_FTRUNCATE(ftruncate, off_t)
DEFINE_FTRUNCATE(ftruncate64, off64_t)

/* posix_fallocate returns the error and leaves errno alone. */
#define DEFINE_FALLOCATE(name, offset)                                    \
    int name(int fd, offset at, offset size)                              \
    {                                                                     \
        REAL(int, #name, int, offset, offset);                            \
        enum fate f = fate_of_fd(FALLOCATE, fd);                          \
        if (f == FAIL)                                                    \
            return error_;                                                \
        int result = real(fd, at, size);                                  \
        return f == FAIL_AFTER ? error_ : result;                         \
    }
DEFINE_FALLOCATE(posix_fallocate, off_t)
DEFINE_FALLOCATE(posix_fallocate64, off64_t)

#define DEFINE_MMAP(name, offset)                                         \
    void *name(void *at, size_t size, int protection, int flags, int fd, offset from) \
    {                                                                     \
        REAL(void *, #name, void *, size_t, int, int, int, offset);       \
        if (fate_of_fd(MMAP, fd) != PASS) {                               \
            errno = error_;                                               \
            return MAP_FAILED;                                            \
        }                                                                 \
        return real(at, size, protection, flags, fd, from);               \
    }
DEFINE_MMAP(mmap, off_t)
DEFINE_MMAP(mmap64, off64_t)

int link(const char *from, const char *to)
{
    REAL(int, "link", const char *, const char *);
    WRAP(fate_of(LINK, to), real(from, to));
}

int linkat(int a, const char *from, int b, const char *to, int flags)
{
    REAL(int, "linkat", int, const char *, int, const char *, int);
    WRAP(fate_of(LINK, to), real(a, from, b, to, flags));
}

int rename(const char *from, const char *to)
{
    REAL(int, "rename", const char *, const char *);
    WRAP(fate_of(RENAME, to), real(from, to));
}

int renameat(int a, const char *from, int b, const char *to)
{
    REAL(int, "renameat", int, const char *, int, const char *);
    WRAP(fate_of(RENAME, to), real(a, from, b, to));
}

int mkdir(const char *path, mode_t mode)
{
    REAL(int, "mkdir", const char *, mode_t);
    WRAP(fate_of(MKDIR, path), real(path, mode));
}

int unlink(const char *path)
{
    REAL(int, "unlink", const char *);
    WRAP(fate_of(UNLINK, path), real(path));
}

int unlinkat(int at, const char *path, int flags)
{
    REAL(int, "unlinkat", int, const char *, int);
    WRAP(fate_of(UNLINK, path), real(at, path, flags));
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && clock == CLOCK_REALTIME && clock_offset != 0) {
        long long ns = now->tv_sec * 1000000000LL + now->tv_nsec + clock_offset;
        now->tv_sec = ns / 1000000000LL;
        now->tv_nsec = ns % 1000000000LL;
    }
    return result;
}
