package main

import (
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"schedtrace.test/internal/protocol"
)

func consume(messages <-chan int, done chan<- int) {
	sum := 0
	for message := range messages {
		sum += message
	}
	done <- sum
}

// channels sends bursts to a consumer, by turns over a channel without and with room.
func channels() {
	defer w.wait.Done()
	for room := 0; w.running(); room = 4 - room {
		messages, done := make(chan int, room), make(chan int)
		go func() { consume(messages, done) }()
		for i := 0; i < 50; i++ {
			messages <- 1
		}
		close(messages)
		atomic.AddInt64(&w.messages, int64(<-done))
		time.Sleep(pace)
	}
}

// selector waits for whichever of two senders comes first, or for a timer.
func selector() {
	defer w.wait.Done()
	for w.running() {
		left, right := make(chan int), make(chan int)
		go func() { left <- 1 }()
		go func() { time.Sleep(pace / 4); right <- 1 }()
		for i := 0; i < 2; i++ {
			select {
			case <-left:
			case <-right:
			case <-time.After(time.Second):
			}
			atomic.AddInt64(&w.selects, 1)
		}
	}
}

// locker holds the mutex across a yield, so that the others find it taken and wait.
func locker() {
	defer w.wait.Done()
	for w.running() {
		for i := 0; i < 10; i++ {
			mutex.Lock()
			runtime.Gosched()
			mutex.Unlock()
			atomic.AddInt64(&w.locks, 1)
		}
		time.Sleep(pace)
	}
}

func sleeper() {
	defer w.wait.Done()
	for w.running() {
		time.Sleep(pace)
		atomic.AddInt64(&w.sleeps, 1)
	}
}

var children sync.WaitGroup

func child() {
	children.Done()
}

func spawner() {
	defer w.wait.Done()
	for w.running() {
		children.Add(20)
		for i := 0; i < 20; i++ {
			go child()
		}
		children.Wait()
		atomic.AddInt64(&w.spawns, 20)
		time.Sleep(pace)
	}
}

func yielder() {
	defer w.wait.Done()
	for w.running() {
		for i := 0; i < 20; i++ {
			runtime.Gosched()
		}
		atomic.AddInt64(&w.yields, 20)
		time.Sleep(pace)
	}
}

// spinner computes for longer than the 10 ms after which the runtime preempts a goroutine.
func spinner() {
	defer w.wait.Done()
	x := uint64(88172645463325252)
	for w.running() {
		for end := time.Now().Add(25 * time.Millisecond); time.Now().Before(end); {
			for i := 0; i < 10000; i++ {
				x ^= x << 13
				x ^= x >> 7
				x ^= x << 17
			}
		}
		if x == 0 {
			panic("xorshift never gives 0")
		}
		atomic.AddInt64(&w.spins, 1)
		time.Sleep(25 * time.Millisecond)
	}
}

// allocator makes about 50 MB of garbage a second, among it pointers that the collector has to follow.
func allocator() {
	defer w.wait.Done()
	type link struct {
		next *link
		room [50]int
	}
	for w.running() {
		var chain *link
		for i := 0; i < 100; i++ {
			chain = &link{next: chain}
		}
		if chain.next == nil {
			panic("the chain has 100 links")
		}
		atomic.AddInt64(&w.allocations, 100)
		time.Sleep(pace)
	}
}

func writer() {
	defer w.wait.Done()
	file, err := os.CreateTemp("", "mixed")
	if err != nil {
		protocol.Fail(err)
	}
	defer file.Close()
	os.Remove(file.Name())
	for w.running() {
		for i := 0; i < 50; i++ {
			if _, err := file.WriteAt([]byte("x"), int64(i)); err != nil {
				protocol.Fail(err)
			}
		}
		atomic.AddInt64(&w.writes, 50)
		time.Sleep(pace)
	}
}
