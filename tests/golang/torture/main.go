// Torture: whatever could break if something outside disturbed a Go program's stacks, heap or scheduling, with a
// checksum over all of it that depends on -rounds alone, never on timing or on the number of Ps.
//
// A round is stack growth by deep recursion, garbage that the collector must take and data that it must keep, panics
// through deferred calls, goroutines that come and go, two goroutines that hand a value to and fro, and now and then
// goroutines that compute until they are preempted. One round is about 10,000 changes of a goroutine's state.
package main

import (
	"flag"
	"fmt"
	"hash/fnv"
	"runtime"
	"runtime/debug"
	"time"

	"schedtrace.test/internal/protocol"
)

// mix is a step of a hash; its order matters, unlike that of addition.
func mix(sum, value uint64) uint64 {
	sum ^= value + 0x9e3779b97f4a7c15 + sum<<6 + sum>>2
	return sum * 0x100000001b3
}

func round(number uint64, kept *keeper) uint64 {
	sum := mix(14695981039346656037, number)
	sum = mix(sum, grow(number))
	sum = mix(sum, kept.churn(number))
	sum = mix(sum, unwind(number))
	sum = mix(sum, spawn(number))
	sum = mix(sum, handOver(number))
	if number%32 == 0 {
		sum = mix(sum, preempted(number))
	}
	return sum
}

func run(rounds int, done chan<- uint64) {
	kept := newKeeper()
	total := fnv.New64a()
	for number := 0; number < rounds; number++ {
		fmt.Fprintf(total, "%d %x\n", number, round(uint64(number), kept))
	}
	done <- total.Sum64()
}

func main() {
	rounds := flag.Int("rounds", 100, "how many rounds")
	procs := flag.Int("procs", 4, "GOMAXPROCS")
	flag.Parse()
	runtime.GOMAXPROCS(*procs)
	debug.SetGCPercent(20) // collect often

	protocol.Ready(protocol.Facts{"rounds": *rounds})
	start := time.Now()
	done := make(chan uint64)
	go run(*rounds, done)
	checksum := <-done
	var memory runtime.MemStats
	runtime.ReadMemStats(&memory)
	protocol.Done(protocol.Facts{
		"rounds":      *rounds,
		"checksum":    fmt.Sprintf("%016x", checksum),
		"collections": memory.NumGC,
		"seconds":     protocol.Elapsed(start),
	})
}
