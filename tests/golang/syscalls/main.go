// Syscalls: exactly -n pairs of a write to and a read from a file, each by one system call that the scheduler knows of
// (os.File on a regular file: pwrite64 and pread64 between entersyscall and exitsyscall, never the network poller).
package main

import (
	"bytes"
	"flag"
	"os"
	"runtime/debug"
	"time"

	"schedtrace.test/internal/protocol"
)

func transfer(n int, file *os.File, done chan<- error) {
	out, in := make([]byte, 64), make([]byte, 64)
	for i := 0; i < n; i++ {
		out[i%len(out)] = byte(i)
		at := int64(i%1024) * int64(len(out))
		if _, err := file.WriteAt(out, at); err != nil {
			done <- err
			return
		}
		if _, err := file.ReadAt(in, at); err != nil {
			done <- err
			return
		}
		if !bytes.Equal(in, out) {
			panic("read something else than was written")
		}
	}
	done <- nil
}

func main() {
	n := flag.Int("n", 100003, "pairs of write and read")
	flag.Parse()
	debug.SetGCPercent(-1)
	file, err := os.CreateTemp("", "syscalls")
	if err != nil {
		protocol.Fail(err)
	}
	os.Remove(file.Name())

	protocol.Ready(protocol.Facts{"n": *n})
	done := make(chan error, 1)
	start := time.Now()
	go transfer(*n, file, done)
	if err := <-done; err != nil {
		protocol.Fail(err)
	}
	protocol.Done(protocol.Facts{"n": *n, "syscalls": 2 * *n, "seconds": protocol.Elapsed(start)})
}
