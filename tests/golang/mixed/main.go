// Mixed: everything a scheduler sees, for -duration: channels, select, contended mutexes, sleeps, loopback TCP,
// goroutines that come and go, Gosched, goroutines preempted after 10 ms of computing, and on request system calls.
//
// All of it begins after "go" and has ended before "done": goroutines of the work are started after the execution
// trace (-trace) and end before it stops, so that the trace and an observer from outside see the same transitions.
// Each kind is paced by short sleeps, so that none drowns the others and the trace stays readable.
package main

import (
	"flag"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/trace"
	"sync"
	"sync/atomic"
	"time"

	"schedtrace.test/internal/protocol"
)

const pace = time.Millisecond

// counts is what was done, by kind. Only whole operations count.
type counts struct {
	messages, selects, locks, sleeps, exchanges, spawns, yields, spins, writes int64
}

type work struct {
	until time.Time
	wait  sync.WaitGroup
	counts
}

func (w *work) running() bool {
	return time.Now().Before(w.until)
}

func (w *work) start(n int, run func(*work)) {
	for i := 0; i < n; i++ {
		w.wait.Add(1)
		go func() {
			defer w.wait.Done()
			run(w)
		}()
	}
}

func main() {
	duration := flag.Duration("duration", 3*time.Second, "how long to work")
	procs := flag.Int("procs", 2, "GOMAXPROCS")
	syscalls := flag.Bool("syscalls", false, "also write to a file")
	collect := flag.Bool("gc", true, "let the garbage collector run")
	traceFile := flag.String("trace", "", "write Go's execution trace of the work to this file")
	flag.Parse()
	runtime.GOMAXPROCS(*procs)
	if !*collect {
		debug.SetGCPercent(-1)
	}
	server := listen()

	protocol.Ready(protocol.Facts{})
	if *traceFile != "" {
		file, err := os.Create(*traceFile)
		if err == nil {
			err = trace.Start(file)
		}
		if err != nil {
			protocol.Fail(err)
		}
	}
	start := time.Now()
	w := &work{until: start.Add(*duration)}
	w.start(2, channels)
	w.start(1, selector)
	mutex := new(sync.Mutex)
	w.start(4, func(w *work) { locker(w, mutex) })
	w.start(8, sleeper)
	w.start(2, func(w *work) { client(w, server) })
	w.start(1, spawner)
	w.start(2, yielder)
	w.start(1, spinner)
	if *syscalls {
		w.start(1, writer)
	}
	w.wait.Wait()
	server.close()
	seconds := protocol.Elapsed(start)
	if *traceFile != "" {
		trace.Stop()
	}
	protocol.Done(protocol.Facts{
		"seconds":   seconds,
		"messages":  atomic.LoadInt64(&w.messages),
		"selects":   atomic.LoadInt64(&w.selects),
		"locks":     atomic.LoadInt64(&w.locks),
		"sleeps":    atomic.LoadInt64(&w.sleeps),
		"exchanges": atomic.LoadInt64(&w.exchanges),
		"spawns":    atomic.LoadInt64(&w.spawns),
		"yields":    atomic.LoadInt64(&w.yields),
		"spins":     atomic.LoadInt64(&w.spins),
		"writes":    atomic.LoadInt64(&w.writes),
	})
}
