// Opens a run's signed checkpoints with Go's own sumdb/note and recomputes every root with its tlog: an implementation
// that shares no line with ours. It is vendored in the Go distribution, so no module is fetched:
//
//	cp -r $(go env GOROOT)/src/cmd/vendor/golang.org/x/mod/sumdb mod/sumdb        # into a folder `mod` of your own
//	rm -r mod/sumdb/*.go mod/sumdb/dirhash && printf 'module golang.org/x/mod\ngo 1.22\n' > mod/go.mod
//	go mod init notes && go mod edit -replace golang.org/x/mod=./mod -require golang.org/x/mod@v0.0.0
//	GOFLAGS=-mod=mod go run . VKEY ORIGIN runs/RUN/checkpoint/*
//
// VKEY is the `key` that `rlk-ledger checkpoint RUN --json` prints, ORIGIN its `origin`.
package main

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/mod/sumdb/note"
	"golang.org/x/mod/sumdb/tlog"
)

type store []tlog.Hash

func (s store) ReadHashes(ix []int64) ([]tlog.Hash, error) {
	out := make([]tlog.Hash, len(ix))
	for i, x := range ix {
		out[i] = s[x]
	}
	return out, nil
}

func main() {
	v, err := note.NewVerifier(os.Args[1])
	if err != nil {
		panic(err)
	}
	var hashes store
	var size int64
	for _, file := range os.Args[3:] {
		data, _ := os.ReadFile(file)
		n, err := note.Open(data, note.VerifierList(v))
		if err != nil {
			fmt.Println("note.Open:", file, err)
			os.Exit(1)
		}
		lines := strings.Split(n.Text, "\n")
		var info struct{ Leaves string }
		if err := json.Unmarshal([]byte(lines[3]), &info); err != nil {
			panic(err)
		}
		raw, err := base64.StdEncoding.DecodeString(info.Leaves)
		if err != nil {
			panic(err)
		}
		for i := 0; i < len(raw); i += 32 {
			var h tlog.Hash
			copy(h[:], raw[i:])
			more, err := tlog.StoredHashesForRecordHash(size, h, hashes)
			if err != nil {
				panic(err)
			}
			hashes = append(hashes, more...)
			size++
		}
		root, err := tlog.TreeHash(size, hashes)
		if err != nil {
			panic(err)
		}
		want, _ := strconv.ParseInt(lines[1], 10, 64)
		fmt.Println(file, "origin", lines[0] == os.Args[2], "sigs", len(n.Sigs), "size", size == want, "root", root.String() == lines[2])
	}
}
