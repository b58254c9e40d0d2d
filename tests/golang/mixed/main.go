// Mixed: everything a scheduler sees, for -duration: channels, select, contended mutexes, sleeps, loopback TCP,
// goroutines that come and go, Gosched, goroutines preempted after 10 ms of computing; on request system calls and
// garbage collection.
//
// All of it begins after "go" and has ended before "done": goroutines of the work are started after the execution
// trace (-trace) and end before it stops, so that the trace and an observer from outside see the same transitions.
// Each kind is paced by short sleeps, so that none drowns the others and the trace stays readable.
package main

import (
	"flag"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"schedtrace.test/internal/protocol"
	"schedtrace.test/internal/tracing"
)

const pace = time.Millisecond

// counts is what was done, by kind. Only whole operations count.
type counts struct {
	messages, selects, locks, sleeps, exchanges, spawns, yields, spins, writes, allocations int64
}

type work struct {
	until time.Time
	wait  sync.WaitGroup
	counts
}

// What the kinds of work need. They take no arguments, so that a goroutine starts as the function it is named after
// and not as a wrapper that the compiler makes; the execution trace looks through those, an observer from outside may
// not.
var (
	w      = new(work)
	mutex  sync.Mutex
	server *echo
)

// running is true until the time is over.
func (w *work) running() bool {
	return time.Now().Before(w.until)
}

// times starts n goroutines; each begins in a function of its own kind, which is the name it is known by.
func (w *work) times(n int, start func()) {
	w.wait.Add(n)
	for i := 0; i < n; i++ {
		start()
	}
}

func main() {
	duration := flag.Duration("duration", 3*time.Second, "how long to work")
	procs := flag.Int("procs", 2, "GOMAXPROCS")
	syscalls := flag.Bool("syscalls", false, "also write to a file")
	collect := flag.Bool("gc", false, "also make garbage, and let it be collected")
	traceFile := flag.String("trace", "", "write Go's execution trace of the work to this file")
	flag.Parse()
	runtime.GOMAXPROCS(*procs)
	if !*collect {
		debug.SetGCPercent(-1)
	}
	server = listen()

	protocol.Ready(protocol.Facts{})
	stop := tracing.Start(*traceFile)
	start := time.Now()
	w.until = start.Add(*duration)
	w.times(2, func() { go channels() })
	w.times(1, func() { go selector() })
	w.times(4, func() { go locker() })
	w.times(8, func() { go sleeper() })
	w.times(2, func() { go client() })
	w.times(1, func() { go spawner() })
	w.times(2, func() { go yielder() })
	w.times(1, func() { go spinner() })
	if *collect {
		w.times(2, func() { go allocator() })
	}
	if *syscalls {
		w.times(1, func() { go writer() })
	}
	w.wait.Wait()
	server.close()
	seconds := protocol.Elapsed(start)
	stop()
	protocol.Done(protocol.Facts{
		"seconds":     seconds,
		"messages":    atomic.LoadInt64(&w.messages),
		"selects":     atomic.LoadInt64(&w.selects),
		"locks":       atomic.LoadInt64(&w.locks),
		"sleeps":      atomic.LoadInt64(&w.sleeps),
		"exchanges":   atomic.LoadInt64(&w.exchanges),
		"spawns":      atomic.LoadInt64(&w.spawns),
		"yields":      atomic.LoadInt64(&w.yields),
		"spins":       atomic.LoadInt64(&w.spins),
		"writes":      atomic.LoadInt64(&w.writes),
		"allocations": atomic.LoadInt64(&w.allocations),
	})
}
