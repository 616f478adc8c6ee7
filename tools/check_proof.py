"""Checks a proof bundle of `rlk-ledger prove` offline. It needs nothing but Python: copy this one file anywhere.
    python -I -S check_proof.py BUNDLE [--key VKEY|FILE]... [--checkpoint NOTE]
Exit codes: 0 proved, as far as is printed; 1 not proved; 2 a wrong call. After RFC 6962 (trees), RFC 8032 (Ed25519),
c2sp.org/signed-note, c2sp.org/tlog-checkpoint and, for events, receipts and bundles, rlk_ledger/README.md.
"""

# fmt: off
# ruff: noqa: E401, E701, I001 - short enough to be read whole by whoever has to trust it
import argparse, base64, hashlib, json, pathlib, struct, sys
P, L = 2**255 - 19, 2**252 + 27742317777372353535851937790883648493
D, ROOT_OF_MINUS_1 = -121665 * pow(121666, -1, P) % P, pow(2, (P - 1) // 4, P)
WIDTHS = "BHI   fdBHIQbhiq     BHIHIHI"  # of what follows msgpack's 0xC4 to 0xDF, as struct names it
def need(holds, otherwise):
    if not holds: raise ValueError(otherwise)
def sha256(*parts):
    return hashlib.sha256(b"".join(parts)).digest()
def b64(text, size=None):
    data = base64.b64decode(text, validate=True)
    need(base64.b64encode(data).decode() == text and size in (None, len(data)), "base64 that its encoder did not write")
    return data
# -- Ed25519, RFC 8032 section 5.1, strictly: S < L, points in their one encoding, no key of small order
def point(data):
    y, odd = int.from_bytes(data, "little") % 2**255, data[31] >> 7
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P: x = x * ROOT_OF_MINUS_1 % P
    need((x * x - square) % P == 0 and y < P and (x or not odd), "32 bytes that are no point of Ed25519")
    if x & 1 != odd: x = P - x
    return x, y, 1, x * y % P
def add(p, q):
    a, b = (p[1] - p[0]) * (q[1] - q[0]), (p[1] + p[0]) * (q[1] + q[0])
    c, d = 2 * D * p[3] * q[3], 2 * p[2] * q[2]
    return (b - a) * (d - c) % P, (d + c) * (b + a) % P, (d - c) * (d + c) % P, (b - a) * (b + a) % P
def times(n, p):
    rest = times(n >> 1, add(p, p)) if n > 1 else (0, 1, 1, 0)
    return add(rest, p) if n & 1 else rest
def signed(public, message, signature):  # whether it is that of `message` by the key `public`
    if len(public) != 32 or len(signature) != 64: return False
    key, s = point(public), int.from_bytes(signature[32:], "little")
    h = int.from_bytes(hashlib.sha512(signature[:32] + public + message).digest(), "little") % L
    p, q = times(s, point(b"\x58" + b"\x66" * 31)), add(point(signature[:32]), times(h, key))
    return (p[0] * q[2] - q[0] * p[2]) % P == 0 == (p[1] * q[2] - q[1] * p[2]) % P and s < L and times(8, key)[0] != 0
# -- trees as RFC 6962 section 2.1 defines them, read from the root down; a path is a list of hashes
def climb(leaf, i, n, path):  # the root that `path` gives when `leaf` is number i of n
    need(type(i) is type(n) is int and 0 <= i < n and (n > 1) == bool(path), f"the path is not of entry {i} of {n}")
    if n == 1: return leaf
    k = 1 << (n - 1).bit_length() - 1
    if i < k: return sha256(b"\1", climb(leaf, i, k, path[:-1]), b64(path[-1], 32))
    return sha256(b"\1", b64(path[-1], 32), climb(leaf, i - k, n - k, path[:-1]))
def prefix(m, n, path, root):  # (root of the first m, of n) that `path` gives; `root` is the first, where known
    need(type(m) is type(n) is int and 0 < m <= n, f"a log of {n} entries does not continue one of {m}")
    need(len(path) == (root is None) if m == n else path, "a consistency path of another length")
    if m == n: return (root or b64(path[0], 32),) * 2
    k = 1 << (n - 1).bit_length() - 1
    old, new = prefix(m, k, path[:-1], root) if m <= k else prefix(m - k, n - k, path[:-1], None)
    top = b64(path[-1], 32)
    return (old, sha256(b"\1", new, top)) if m <= k else (sha256(b"\1", top, old), sha256(b"\1", top, new))
# -- formats
def unpack(data, at=0):  # (value, end) of the msgpack value at `at`
    kind, at = data[at], at + 1
    if kind < 0x80 or kind > 0xDF: return kind - (256 if kind > 0xDF else 0), at
    if 0xC0 <= kind < 0xC4: return {0xC0: None, 0xC2: False, 0xC3: True}[kind], at
    count = kind & (15 if kind < 0xA0 else 31)
    if kind > 0xC3:
        count = struct.unpack_from(">" + WIDTHS[kind - 0xC4], data, at)[0]
        at += struct.calcsize(">" + WIDTHS[kind - 0xC4])
    if 0xC9 < kind < 0xD4: return count, at
    if 0xC3 < kind < 0xC7: return data[at : at + count], at + count
    if 0x9F < kind < 0xC0 or 0xD8 < kind < 0xDC: return data[at : at + count].decode(), at + count
    items, pairs = [], kind < 0x90 or kind > 0xDD
    for _ in range(count + count * pairs):
        item, at = unpack(data, at)
        items.append(item)
    return dict(zip(items[::2], items[1::2])) if pairs else items, at
def event_leaf(envelope, arrays):
    parts = [b"\0", struct.pack("<I", len(envelope)), envelope]
    for array in sorted(arrays, key=lambda array: array["name"]):
        for word in (array["name"].encode(), array["dtype"].encode()): parts += [bytes((len(word),)), word]
        content = sha256(b64(array["data"])) if "data" in array else b64(array["sha256"], 32)
        parts += [struct.pack("<Q", array["n"]), content]
    return sha256(*parts)
def with_self(line, head="", end=""):  # what canonical JSON holds whose `self` is the SHA-256 of head, the rest and end
    found, rest = json.loads(line), {key: value for key, value in json.loads(line).items() if key != "self"}
    whole, rest = (json.dumps(x, sort_keys=True, separators=(",", ":"), ensure_ascii=False) for x in (found, rest))
    need(whole == line and found["self"] == f"sha256:{sha256((head + rest + end).encode()).hex()}", "`self` is wrong")
    return found
def read_note(text):  # (what signatures are over, origin, size, root, last line, signature lines) of a checkpoint
    body, _, end = text.rpartition("\n\n")
    lines = body.split("\n")
    good = len(lines) > 2 and all(lines) and end[-1:] in ("", "\n") and text.replace("\n", "").isprintable()
    need(good and str(int(lines[1])) == lines[1], "the checkpoint is no signed note")
    return body + "\n", lines[0], int(lines[1]), b64(lines[2], 32), lines[-1], end.split("\n")[:-1]
def check_signatures(text, lines, vkeys):  # refuses unless each of `vkeys` signed, and nothing wrong
    pairs = [line.removeprefix("— ").split(" ") for line in lines]
    for vkey in vkeys:
        key = b64(vkey.split("+", 2)[2], 33)
        mine = [b64(raw)[4:] for name, raw in pairs if b64(raw)[:4] == sha256(name.encode(), b"\n", key)[:4]]
        need(mine and all(key[0] == 1 and signed(key[1:], text.encode(), x) for x in mine), f"not signed by {vkey}")
def follow(bundle, receipt):  # the event's fields, when the receipt's root covers it; None when it holds no event
    event, named = bundle["event"], (receipt["run_id"], bundle["writer_id"], bundle["seq"])
    need(type(named[2]) is int and named[1].isprintable() and named[1].isascii(), "that is no name of an event")
    if event is None:
        held = [w.get("ranges", [[w["first"], w["last"]]]) for w in receipt["writers"] if w["writer_id"] == named[1]]
        return need(any(a <= named[2] <= b for spans in held for a, b in spans), "the receipt does not name this event")
    said, end = unpack(envelope := b64(event["envelope"]))
    need(end == len(envelope) and (said["run_id"], said["writer_id"], said["seq"]) == named, "it is another event")
    leaf = b64(event["leaf"])
    root = "sha256:" + climb(leaf, event["index"], receipt["segment"]["rows"], event["path"]).hex()
    need(leaf == event_leaf(envelope, event["arrays"]) and root == receipt["root"], "the receipt has no such event")
    return said | {"arrays": [f"{array['name']}: {array['n']} x {array['dtype']}" for array in event["arrays"]]}
def check(bundle, vkeys=(), kept=None):  # what is proved and what not, as text; raises ValueError when nothing is
    names = {"kind", "format", "writer_id", "seq", "event", "receipt", "log", "checkpoint", "since"}
    need(set(bundle) == names and (bundle["kind"], bundle["format"]) == ("rlk-ledger proof", 1), "no proof of format 1")
    receipt, log, since = with_self(bundle["receipt"]), bundle["log"], bundle["since"]
    text, origin, size, root, last, signatures = read_note(bundle["checkpoint"])
    with_self(last, text.removesuffix(last + "\n"), "\n")
    need(origin == f"rlk-ledger/{receipt['ledger_id']}/{receipt['run_id']}", "receipt and checkpoint are of two logs")
    said, leaf = follow(bundle, receipt), sha256(b"\0", bundle["receipt"].encode())
    need(climb(leaf, log["index"], size, log["path"]) == root, "the receipt is not under the checkpoint")
    check_signatures(text, signatures, vkeys)
    roots = {size: root}
    if since is not None:
        roots[since["size"]] = old = b64(since["root"], 32)
        need(prefix(since["size"], size, since["path"], old) == (old, root), "it does not continue the older one")
    if kept is not None:
        _, kept_origin, kept_size, kept_root, _, _ = read_note(kept)
        need(kept_origin == origin and roots.get(kept_size) == kept_root, "it does not continue the one you kept")
        need(vkeys or log["index"] < kept_size, "the checkpoint you kept is older than the event; give --key as well")
    proved = f"""proved: event {bundle["seq"]} of writer {bundle["writer_id"]} of run {receipt["run_id"]}
  it says: {json.dumps(said, default=repr) if said else "(not in this bundle: its segment may be gone; it is named)"}
  its receipt is number {log["index"]} of {size} in the log {origin}
  under the root {base64.b64encode(root).decode()}"""
    trust = [f"signed by {vkey}" for vkey in vkeys] + ["in one history with the one you kept"] * (kept is not None)
    alone = "UNSIGNED as far as you asked: only as good as this copy of the checkpoint; compare it with another"
    return f"{proved}, {' and '.join(trust) or alone}\nnot proved: that what was recorded is true, or its clocks right"
def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", metavar="BUNDLE", help="what `rlk-ledger prove -o` wrote")
    parser.add_argument("--key", action="append", default=[], help="C2SP vkey, or its file, that must have signed")
    parser.add_argument("--checkpoint", metavar="NOTE", help="a checkpoint that you kept elsewhere")
    given = parser.parse_args()
    try:
        texts = [pathlib.Path(x).read_bytes().decode() for x in (given.bundle, given.checkpoint) if x]
        vkeys = [pathlib.Path(x).read_text().strip() if pathlib.Path(x).is_file() else x for x in given.key]
        bundle, kept = json.loads(texts[0]), texts[1] if given.checkpoint else None
    except (OSError, ValueError, RecursionError) as error:
        parser.error(f"BUNDLE is what `rlk-ledger prove -o` wrote, NOTE what `checkpoint -o` wrote: {error}")
    try: print(check(bundle, vkeys, kept))
    except Exception as error: sys.exit(f"not proved: {error}")
if __name__ == "__main__": main()
