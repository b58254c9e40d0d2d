// Latencies: many goroutines that want few Ps, and what the runtime itself says of how long they waited.
//
// Prints by how much each bucket of runtime/metrics' /sched/latencies:seconds grew over the work. The runtime samples
// one in eight of the times that a goroutine stops running, so its counts are about an eighth of the true ones. With
// -calls the goroutines also make system calls: up to Go 1.25 these are sampled, too, as waits of no length at all.
package main

import (
	"flag"
	"math"
	"math/rand"
	"os"
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

type work struct {
	until        time.Time
	file         *os.File // nil: no system calls
	turns, calls int64
	sink         uint64
	wait         sync.WaitGroup
}

// worker takes turns of uneven length: it yields after some and sleeps after others. Which of them follows no pattern,
// since a sample of every eighth would see one phase of it only.
func (w *work) worker(id int) {
	defer w.wait.Done()
	random := rand.New(rand.NewSource(int64(id)))
	for time.Now().Before(w.until) {
		atomic.AddUint64(&w.sink, burn(1000+random.Intn(20000)))
		atomic.AddInt64(&w.turns, 1)
		for i := random.Intn(3); i > 0 && w.file != nil; i-- {
			if _, err := w.file.WriteAt([]byte("x"), int64(id)); err != nil {
				protocol.Fail(err)
			}
			atomic.AddInt64(&w.calls, 1)
		}
		if random.Intn(4) == 0 {
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
	calls := flag.Bool("calls", false, "also make system calls")
	flag.Parse()
	runtime.GOMAXPROCS(*procs)
	debug.SetGCPercent(-1)
	w := new(work)
	if *calls {
		var err error
		if w.file, err = os.CreateTemp("", "latencies"); err != nil {
			protocol.Fail(err)
		}
		os.Remove(w.file.Name())
	}

	protocol.Ready(protocol.Facts{"goroutines": *goroutines})
	before := histogram()
	w.until = time.Now().Add(*duration)
	w.wait.Add(*goroutines)
	for id := 0; id < *goroutines; id++ {
		go w.worker(id)
	}
	w.wait.Wait()
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
		"turns": w.turns, "calls": w.calls, "bounds_seconds": bounds, "counts": counts, "goroutines": *goroutines,
	})
}
