// Cshared: Go as a library (-buildmode=c-shared) in a program that is not Go's; host/ is such a program.
package main

import "C"

import "schedtrace.test/internal/protocol"

// Without arguments, so that ping and pong are started as themselves and not through a wrapper that the compiler makes.
var (
	rounds      int
	there, back = make(chan int), make(chan int)
	done        = make(chan bool, 2)
)

func ping() {
	for i := 0; i < rounds; i++ {
		there <- i
		<-back
	}
	done <- true
}

func pong() {
	for i := 0; i < rounds; i++ {
		back <- <-there
	}
	done <- true
}

// Serve speaks the protocol and does n round trips, as pingpong does; it does not return.
//
//export Serve
func Serve(n C.int) {
	protocol.Ready(protocol.Facts{"n": int(n)})
	rounds = int(n)
	go ping()
	go pong()
	<-done
	<-done
	protocol.Done(protocol.Facts{"n": int(n), "parks": 2 * int(n), "readies": 2 * int(n)})
}

func main() {}
