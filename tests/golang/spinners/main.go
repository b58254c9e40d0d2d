// Spinners: more threads that want to run than there are CPUs, so that threads wait for CPUs.
//
// -threads goroutines compute without pause, on as many Ps; -locked of them are locked to their threads. Until "go"
// they are not started, and after the work all of them have ended. The threads stay.
package main

import (
	"flag"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"schedtrace.test/internal/protocol"
)

func spin(until time.Time, locked bool, rounds *int64, wait *sync.WaitGroup) {
	defer wait.Done()
	if locked {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
	}
	x := uint64(88172645463325252)
	for n := int64(0); ; n++ {
		for i := 0; i < 100000; i++ {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
		}
		if !time.Now().Before(until) {
			atomic.AddInt64(rounds, n+int64(x&1))
			return
		}
	}
}

func main() {
	threads := flag.Int("threads", 6, "busy goroutines, and GOMAXPROCS")
	locked := flag.Int("locked", 2, "how many of them are locked to their threads")
	duration := flag.Duration("duration", 3*time.Second, "how long they compute")
	flag.Parse()
	runtime.GOMAXPROCS(*threads)
	debug.SetGCPercent(-1)

	protocol.Ready(protocol.Facts{"threads": *threads, "locked": *locked})
	var rounds int64
	var wait sync.WaitGroup
	start := time.Now()
	for i := 0; i < *threads; i++ {
		wait.Add(1)
		go spin(start.Add(*duration), i < *locked, &rounds, &wait)
	}
	wait.Wait()
	protocol.Done(protocol.Facts{
		"threads": *threads, "locked": *locked, "rounds": rounds, "seconds": protocol.Elapsed(start),
	})
}
