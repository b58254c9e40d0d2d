//go:build go1.23

// Coroutines: exactly -n values pulled from an iterator, one coroutine switch there and one back for each.
//
// The iterator has one value more than are pulled; what ends it is stop, which costs one more switch there and, as
// the coroutine exits, one back. So main.puller switches n+1 times and the coroutine n times and once by its exit.
package main

import (
	"flag"
	"iter"
	"runtime/debug"
	"time"

	"schedtrace.test/internal/protocol"
	"schedtrace.test/internal/tracing"
)

func numbers(n int) iter.Seq[int] {
	return func(yield func(int) bool) {
		for i := 0; i <= n; i++ {
			if !yield(i) {
				return
			}
		}
	}
}

// Without arguments, so that it is started as itself and not through a wrapper that the compiler makes.
var (
	values int
	done   = make(chan int, 1)
)

func puller() {
	next, stop := iter.Pull(numbers(values))
	sum := 0
	for i := 0; i < values; i++ {
		value, _ := next()
		sum += value
	}
	stop()
	done <- sum
}

func main() {
	n := flag.Int("n", 100003, "values to pull")
	traceFile := flag.String("trace", "", "write Go's execution trace of the work to this file")
	flag.Parse()
	debug.SetGCPercent(-1)

	protocol.Ready(protocol.Facts{"n": *n})
	stop := tracing.Start(*traceFile)
	values = *n
	start := time.Now()
	go puller()
	if sum := <-done; sum != *n*(*n-1)/2 {
		panic("values were lost")
	}
	seconds := protocol.Elapsed(start)
	stop()
	protocol.Done(protocol.Facts{
		"n": *n, "switches": 2 * (*n + 1), "seconds": seconds,
	})
}
