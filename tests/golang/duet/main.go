// Duet: exactly -n round trips over two unbuffered channels between main.main and main.partner, for tests that see only
// totals over all goroutines of a process: unlike in pingpong nobody waits for the two to end.
//
// As in pingpong every message costs exactly one park and one ready, so that the process's waits for channels are
// exactly 2n, whoever comes first. Nothing else in it waits for a channel once it is ready. With -exit it doesn't wait
// to be told when to begin, and ends with that status after the work: a container that crashes. Then -before and -after
// say how long it stays idle before and after.
package main

import (
	"flag"
	"os"
	"runtime/debug"
	"time"

	"schedtrace.test/internal/protocol"
)

var there, back = make(chan int), make(chan int)

func partner() {
	for {
		back <- <-there + 1
	}
}

func work(n int) {
	for i := 0; i < n; i++ {
		there <- i
		if <-back != i+1 {
			panic("messages were lost")
		}
	}
}

func main() {
	n := flag.Int("n", 20011, "round trips")
	status := flag.Int("exit", -1, "begin at once and end with this status")
	before := flag.Duration("before", 0, "with -exit: stay idle so long before the work")
	after := flag.Duration("after", 0, "with -exit: stay idle so long after it")
	flag.Parse()
	debug.SetGCPercent(-1)

	go partner()
	time.Sleep(10 * time.Millisecond) // partner waits for its first message from now on
	if *status >= 0 {
		time.Sleep(*before)
		work(*n)
		time.Sleep(*after)
		os.Exit(*status)
	}
	protocol.Ready(protocol.Facts{"n": *n})
	start := time.Now()
	work(*n)
	protocol.Done(protocol.Facts{"n": *n, "parks": 2 * *n, "readies": 2 * *n, "seconds": protocol.Elapsed(start)})
}
