// Stops: stops the world so many times, by garbage collections and by reading memory statistics, and no other time.
//
// Prints how often, and what the runtime says of its pauses: by MemStats.PauseTotalNs those for collections and, from
// Go 1.22 on, by runtime/metrics how long the world was stopped and how long it took to stop it, summed from the middles
// of the histograms' buckets.
package main

import (
	"flag"
	"math"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"

	"schedtrace.test/internal/protocol"
)

const (
	collectingPauses = "/sched/pauses/total/gc:seconds"
	otherPauses      = "/sched/pauses/total/other:seconds"
)

func stoppingSeconds() float64 {
	return seconds("/sched/pauses/stopping/gc:seconds") + seconds("/sched/pauses/stopping/other:seconds")
}

// seconds is what a histogram holds, each value as the middle of its bucket; -1 where the runtime has none of that name.
func seconds(name string) float64 {
	sample := []metrics.Sample{{Name: name}}
	metrics.Read(sample)
	if sample[0].Value.Kind() != metrics.KindFloat64Histogram {
		return -1
	}
	histogram := sample[0].Value.Float64Histogram()
	sum := 0.0
	for i, count := range histogram.Counts {
		low, high := histogram.Buckets[i], histogram.Buckets[i+1]
		if count != 0 && !math.IsInf(low, 0) && !math.IsInf(high, 0) {
			sum += float64(count) * (low + high) / 2
		}
	}
	return sum
}

func main() {
	collections := flag.Int("collections", 20, "calls of runtime.GC")
	readings := flag.Int("readings", 30, "calls of runtime.ReadMemStats")
	pause := flag.Duration("pause", time.Millisecond, "between them")
	flag.Parse()
	debug.SetGCPercent(-1)
	kept := make([][]*int, 100)
	for i := range kept {
		kept[i] = make([]*int, 1000)
	}
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	collecting, other, stopping := seconds(collectingPauses), seconds(otherPauses), stoppingSeconds()

	protocol.Ready(protocol.Facts{})
	for i := 0; i < *collections; i++ {
		runtime.GC()
		time.Sleep(*pause)
	}
	for i := 0; i < *readings; i++ {
		runtime.ReadMemStats(&after)
		time.Sleep(*pause)
	}
	runtime.KeepAlive(kept)
	protocol.Done(protocol.Facts{
		"collections":        *collections,
		"readings":           *readings,
		"pause_total_ns":     after.PauseTotalNs - before.PauseTotalNs,
		"collecting_seconds": seconds(collectingPauses) - collecting,
		"other_seconds":      seconds(otherPauses) - other,
		"stopping_seconds":   stoppingSeconds() - stopping,
	})
}
