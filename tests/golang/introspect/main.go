// Introspect: a bit of everything for -duration, and then, whenever it is asked, what the runtime says of itself.
//
// The first "go" lets it work; it answers that one and every further "go" with a "done" that has runtime/metrics'
// histograms and the runtime's own counts. Between two of them it sits in a read of its standard input.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"strings"
	"sync"
	"time"

	"schedtrace.test/internal/protocol"
)

var (
	parked  = make(chan bool)
	garbage [][]byte
	called  func() // what a build with cgo adds
	extra   int    // Ms without a thread: with cgo there is one
)

func park() {
	<-parked
}

// turns yields, sleeps and makes system calls.
func turns(until time.Time, file *os.File, all *sync.WaitGroup) {
	defer all.Done()
	for n := 0; time.Now().Before(until); n++ {
		for x := 0; x < 2000*(n%7); x++ {
			runtime.KeepAlive(x)
		}
		switch n % 4 {
		case 0:
			time.Sleep(50 * time.Microsecond)
		case 1:
			file.WriteAt([]byte("x"), 0)
		default:
			runtime.Gosched()
		}
	}
}

// lockedIn ends with its thread locked to it, so that the thread ends, too.
func lockedIn(all *sync.WaitGroup) {
	runtime.LockOSThread()
	all.Done()
}

// main has m0 to itself: the thread of a goroutine that ends locked to m0 stays, although the runtime counts it as gone.
func init() {
	runtime.LockOSThread()
}

func work(duration time.Duration, goroutines int) {
	file, err := os.CreateTemp("", "introspect")
	if err != nil {
		protocol.Fail(err)
	}
	defer file.Close()
	os.Remove(file.Name())
	for i := 0; i < goroutines; i++ {
		go park()
	}
	var all sync.WaitGroup
	until := time.Now().Add(duration)
	all.Add(23)
	for i := 0; i < 20; i++ {
		go turns(until, file, &all)
	}
	for i := 0; i < 3; i++ {
		go lockedIn(&all)
	}
	for i := 0; i < 3; i++ {
		for j := 0; j < 100; j++ {
			garbage = append(garbage, make([]byte, 10000))
		}
		runtime.GC()
		runtime.ReadMemStats(new(runtime.MemStats)) // stops the world, and not for the collector
	}
	if called != nil {
		called()
	}
	all.Wait()
}

func histogram(h *metrics.Float64Histogram) protocol.Facts {
	bounds := make([]any, len(h.Buckets))
	for i, bound := range h.Buckets {
		if !math.IsInf(bound, 0) { // JSON has no word for that
			bounds[i] = bound
		}
	}
	return protocol.Facts{"bounds_seconds": bounds, "counts": h.Counts}
}

// measure is what runtime/metrics says, by its names, and what the runtime's functions say.
func measure() protocol.Facts {
	var samples []metrics.Sample
	for _, d := range metrics.All() {
		if strings.HasPrefix(d.Name, "/sched/latencies") || strings.HasPrefix(d.Name, "/sched/pauses/") ||
			d.Name == "/gc/pauses:seconds" || d.Name == "/sched/threads/total:threads" ||
			d.Name == "/gc/cycles/total:gc-cycles" || d.Name == "/gc/heap/goal:bytes" {
			samples = append(samples, metrics.Sample{Name: d.Name})
		}
	}
	metrics.Read(samples)
	facts := protocol.Facts{}
	for _, s := range samples {
		if s.Value.Kind() == metrics.KindFloat64Histogram {
			facts[s.Name] = histogram(s.Value.Float64Histogram())
		} else {
			facts[s.Name] = s.Value.Uint64()
		}
	}
	facts["gomaxprocs"] = runtime.GOMAXPROCS(0)
	facts["goroutines"] = runtime.NumGoroutine()
	facts["threads"], _ = runtime.ThreadCreateProfile(nil)
	facts["extra_ms"] = extra
	return facts
}

func main() {
	duration := flag.Duration("duration", 200*time.Millisecond, "how long it works")
	goroutines := flag.Int("goroutines", 131, "goroutines that wait for ever")
	procs := flag.Int("procs", 3, "GOMAXPROCS, at first; two more for the work")
	percent := flag.Int("gogc", 100, "GOGC; -1: off")
	flag.Parse()
	runtime.GOMAXPROCS(*procs)
	debug.SetGCPercent(*percent)
	protocol.Ready(protocol.Facts{"goroutines": *goroutines})
	runtime.GOMAXPROCS(*procs + 2)
	work(*duration, *goroutines)
	answers, questions := json.NewEncoder(os.Stdout), bufio.NewReader(os.Stdin)
	for {
		facts := measure()
		facts["event"] = "done"
		if err := answers.Encode(facts); err != nil {
			protocol.Fail(err)
		}
		if word, _ := questions.ReadString('\n'); word != "go\n" {
			os.Exit(0)
		}
	}
}
