// Latencies: many goroutines that want few Ps, and what the runtime itself says of how long they waited.
//
// Prints by how much each bucket of runtime/metrics' /sched/latencies:seconds grew over the work. The runtime samples
// one in eight of a goroutine's moves to running, so its counts are about an eighth of the true ones.
package main

import (
	"flag"
	"math"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"sync/atomic"
	"time"

	"schedtrace.test/internal/protocol"
)

// burn keeps the CPU busy for about n steps and returns something that depends on all of them.
func burn(n int) uint64 {
	x := uint64(n) | 1
	for i := 0; i < n; i++ {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
	}
	return x
}

// worker takes turns of uneven length: it yields after some and sleeps after others.
func worker(id int, until time.Time, sink *uint64, turns *int64, wait *sync.WaitGroup) {
	defer wait.Done()
	for turn := 0; time.Now().Before(until); turn++ {
		atomic.AddUint64(sink, burn(1000+(id*7919+turn*104729)%20000))
		atomic.AddInt64(turns, 1)
		if (id+turn)%4 == 0 {
			time.Sleep(200 * time.Microsecond)
		} else {
			runtime.Gosched()
		}
	}
}

func histogram() *metrics.Float64Histogram {
	sample := []metrics.Sample{{Name: "/sched/latencies:seconds"}}
	metrics.Read(sample)
	return sample[0].Value.Float64Histogram()
}

func main() {
	goroutines := flag.Int("goroutines", 40, "goroutines that want to run")
	procs := flag.Int("procs", 2, "GOMAXPROCS")
	duration := flag.Duration("duration", 5*time.Second, "how long they work")
	flag.Parse()
	runtime.GOMAXPROCS(*procs)
	debug.SetGCPercent(-1)

	protocol.Ready(protocol.Facts{"goroutines": *goroutines})
	var sink uint64
	var turns int64
	var wait sync.WaitGroup
	before := histogram()
	until := time.Now().Add(*duration)
	for id := 0; id < *goroutines; id++ {
		wait.Add(1)
		go worker(id, until, &sink, &turns, &wait)
	}
	wait.Wait()
	after := histogram()

	// Bounds are those between buckets; the outermost ones are infinite and JSON has no word for that.
	counts := make([]uint64, len(after.Counts))
	for i := range counts {
		counts[i] = after.Counts[i] - before.Counts[i]
	}
	bounds := make([]any, len(after.Buckets))
	for i, bound := range after.Buckets {
		if !math.IsInf(bound, 0) {
			bounds[i] = bound
		}
	}
	protocol.Done(protocol.Facts{
		"turns": turns, "bounds_seconds": bounds, "counts": counts, "goroutines": *goroutines,
	})
}
