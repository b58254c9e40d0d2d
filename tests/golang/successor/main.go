// Successor: passes -n messages between two goroutines and then executes another program in its place (the arguments),
// or itself once more (none), which then says "ready" anew and passes as many messages before it is done.
package main

import (
	"flag"
	"os"
	"strconv"
	"syscall"
	"time"

	"schedtrace.test/internal/protocol"
)

var (
	messages int
	channel  = make(chan int)
	done     = make(chan int, 2)
)

func sender() {
	for i := 0; i < messages; i++ {
		channel <- i
	}
	done <- 0
}

func receiver() {
	sum := 0
	for i := 0; i < messages; i++ {
		sum += <-channel
	}
	done <- sum
}

func main() {
	n := flag.Int("n", 1000, "messages")
	generation := flag.Int("generation", 1, "how often this program has been executed in this process")
	flag.Parse()
	protocol.Ready(protocol.Facts{"n": *n, "generation": *generation})
	messages = *n
	go sender()
	go receiver()
	sum := <-done + <-done
	if sum != *n*(*n-1)/2 {
		panic("messages were lost")
	}
	if *generation > 1 {
		protocol.Done(protocol.Facts{"n": *n, "generation": *generation})
	}
	// Goroutines that are under way when the other program takes over.
	for i := 0; i < 10; i++ {
		go func() { <-channel }()
	}
	time.Sleep(50 * time.Millisecond)
	program := flag.Args()
	if len(program) == 0 {
		self, err := os.Executable()
		if err != nil {
			protocol.Fail(err)
		}
		program = []string{self, "-generation", strconv.Itoa(*generation + 1), "-n", strconv.Itoa(*n)}
	}
	protocol.Fail(syscall.Exec(program[0], program, os.Environ()))
}
