// Cshared: Go as a library (-buildmode=c-shared) in a program that is not Go's; host/ is such a program.
package main

import "C"

import "schedtrace.test/internal/protocol"

func ping(n int, there chan<- int, back <-chan int, done chan<- bool) {
	for i := 0; i < n; i++ {
		there <- i
		<-back
	}
	done <- true
}

func pong(n int, there <-chan int, back chan<- int, done chan<- bool) {
	for i := 0; i < n; i++ {
		back <- <-there
	}
	done <- true
}

// Serve speaks the protocol and does n round trips, as pingpong does; it does not return.
//
//export Serve
func Serve(n C.int) {
	protocol.Ready(protocol.Facts{"n": int(n)})
	there, back, done := make(chan int), make(chan int), make(chan bool, 2)
	go ping(int(n), there, back, done)
	go pong(int(n), there, back, done)
	<-done
	<-done
	protocol.Done(protocol.Facts{"n": int(n), "parks": 2 * int(n), "readies": 2 * int(n)})
}

func main() {}
