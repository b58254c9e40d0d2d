package main

import (
	"errors"
	"time"
)

// grow recurses until the goroutine's stack, new each time, has been copied to a larger one several times.
func grow(number uint64) uint64 {
	result := make(chan uint64)
	go func() { result <- recurse(number, int(500+number%1500)) }()
	return <-result
}

//go:noinline
func recurse(value uint64, depth int) uint64 {
	var frame [16]uint64
	for i := range frame {
		frame[i] = mix(value, uint64(i))
	}
	if depth == 0 {
		return frame[value%16]
	}
	below := recurse(frame[depth%16], depth-1)
	// What the frame holds must have survived the copies that the calls below caused.
	return mix(below, frame[(depth+7)%16])
}

// keeper holds data over many collections, beside garbage, and checks that it stays what it was.
type keeper struct {
	trees []*tree
}

type tree struct {
	left, right *tree
	value       uint64
}

func newKeeper() *keeper {
	return &keeper{trees: make([]*tree, 16)}
}

func plant(value uint64, depth int) *tree {
	if depth == 0 {
		return &tree{value: value}
	}
	return &tree{plant(mix(value, 1), depth-1), plant(mix(value, 2), depth-1), value}
}

func (t *tree) sum() uint64 {
	if t == nil {
		return 1
	}
	return mix(mix(t.left.sum(), t.value), t.right.sum())
}

func (k *keeper) churn(number uint64) uint64 {
	slot := number % uint64(len(k.trees))
	old := k.trees[slot].sum()
	k.trees[slot] = plant(number, 9)
	garbage := uint64(0)
	for i := uint64(0); i < 20; i++ {
		garbage = mix(garbage, uint64(len(make([]byte, 1000+i*97))))
	}
	return mix(old, garbage)
}

var errUnwound = errors.New("unwound")

// unwind panics at the end of a chain of calls each of which defers, and recovers at its start and half way.
func unwind(number uint64) (sum uint64) {
	sum = number
	for i := 0; i < 20; i++ {
		func() {
			defer func() {
				if recovered := recover(); recovered == errUnwound {
					sum = mix(sum, uint64(i))
				}
			}()
			sum = mix(sum, fall(int(number%20)+i))
			var nothing *tree
			sum = mix(sum, nothing.value) // the runtime's own panic, from a signal
		}()
		sum = mix(sum, uint64(i))
	}
	return sum
}

//go:noinline
func fall(depth int) (sum uint64) {
	defer func() { sum = mix(sum, uint64(depth)) }()
	if depth == 0 {
		panic(errUnwound)
	}
	if depth == 10 {
		defer func() {
			if recover() == errUnwound {
				sum = 10
			}
		}()
	}
	return mix(fall(depth-1), uint64(depth))
}

// spawn starts goroutines whose results are added up, in whatever order they come.
func spawn(number uint64) uint64 {
	results := make(chan uint64)
	const goroutines = 300
	for i := uint64(0); i < goroutines; i++ {
		go func(i uint64) { results <- recurse(mix(number, i), int(i%20)) }(i)
	}
	sum := uint64(0)
	for i := 0; i < goroutines; i++ {
		sum += <-results
	}
	return sum
}

// handOver passes a value to and fro between two goroutines, each of which changes it.
func handOver(number uint64) uint64 {
	there, back := make(chan uint64), make(chan uint64)
	go func() {
		for value := range there {
			back <- mix(value, 3)
		}
		close(back)
	}()
	value := number
	for i := 0; i < 1500; i++ {
		there <- value
		value = mix(<-back, 5)
	}
	close(there)
	<-back
	return value
}

// preempted computes in more goroutines than there are Ps for longer than the 10 ms after which the runtime
// preempts. How much each computes depends on the clock, what it returns does not.
func preempted(number uint64) uint64 {
	results := make(chan uint64)
	end := time.Now().Add(15 * time.Millisecond)
	for i := uint64(0); i < 6; i++ {
		go func(i uint64) {
			for {
				value := mix(number, i)
				for j := uint64(0); j < 20000; j++ {
					value = mix(value, j)
				}
				if time.Now().After(end) {
					results <- value
					return
				}
			}
		}(i)
	}
	sum := uint64(0)
	for i := 0; i < 6; i++ {
		sum += <-results
	}
	return sum
}
