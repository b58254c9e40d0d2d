// Pingpong: exactly -n round trips over two unbuffered channels between the goroutines main.ping and main.pong.
//
// Every message over an unbuffered channel costs exactly one park and one ready, whatever the number of Ps and
// however the goroutines are preempted: of sender and receiver, the one that comes first to the channel (its lock
// orders them) finds nobody, enqueues itself and parks; the other finds it there, hands over directly and readies it.
// Neither spins, and the commit function of a channel's park never refuses. A round trip is two messages, so ping and
// pong together park exactly 2n times and are readied exactly 2n times; how the 2n divide between them and between
// "chan send" and "chan receive" depends on who came first.
//
// Nothing else parks them or makes them runnable but preemption and being new: they allocate nothing, take no lock,
// make no system call, the collector is off, and the last thing each does is to send into a channel with room.
package main

import (
	"flag"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"time"

	"schedtrace.test/internal/protocol"
	"schedtrace.test/internal/tracing"
)

// Without arguments, so that they are started as themselves and not through a wrapper that the compiler makes.
var (
	rounds      int
	there, back = make(chan int), make(chan int)
	done        = make(chan int, 2)
)

func ping() {
	sum := 0
	for i := 0; i < rounds; i++ {
		there <- i
		sum += <-back
	}
	done <- sum
}

func pong() {
	sum := 0
	for i := 0; i < rounds; i++ {
		got := <-there
		sum += got
		back <- got + 1
	}
	done <- sum
}

func main() {
	n := flag.Int("n", 100003, "round trips")
	procs := flag.Int("procs", 0, "GOMAXPROCS; 0 leaves it")
	traceFile := flag.String("trace", "", "write Go's execution trace of the work to this file")
	profileFile := flag.String("cpuprofile", "", "write a CPU profile of the work to this file")
	flag.Parse()
	if *procs > 0 {
		runtime.GOMAXPROCS(*procs)
	}
	debug.SetGCPercent(-1)

	protocol.Ready(protocol.Facts{"n": *n})
	stopTrace, stopProfile := tracing.Start(*traceFile), profile(*profileFile)
	rounds = *n
	start := time.Now()
	go ping()
	go pong()
	sum := <-done + <-done
	seconds := protocol.Elapsed(start)
	stopProfile()
	stopTrace()
	if want := *n * *n; sum != want { // the sum of 0..n-1 plus the sum of 1..n
		panic("messages were lost")
	}
	protocol.Done(protocol.Facts{
		"n": *n, "parks": 2 * *n, "readies": 2 * *n, "goroutines": 2, "seconds": seconds,
	})
}

// profile begins a CPU profile and returns what ends it. With an empty name there is none.
func profile(name string) (stop func()) {
	if name == "" {
		return func() {}
	}
	file, err := os.Create(name)
	if err == nil {
		err = pprof.StartCPUProfile(file)
	}
	if err != nil {
		protocol.Fail(err)
	}
	return func() {
		pprof.StopCPUProfile()
		file.Close()
	}
}
