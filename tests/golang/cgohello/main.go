// Cgohello: calls C, and is called back -n times from a thread that C made, which the runtime lends a goroutine each
// time.
package main

/*
#cgo LDFLAGS: -lpthread
#include <pthread.h>

extern int cgohelloAdd(int, int);

struct work { int n; int sum; };

static void *call_go(void *argument) {
	struct work *work = argument;
	for (int i = 0; i < work->n; i++)
		work->sum = cgohelloAdd(work->sum, i % 7);
	return 0;
}

static int callbacks(int n) {
	struct work work = {n, 0};
	pthread_t thread;
	if (pthread_create(&thread, 0, call_go, &work) || pthread_join(thread, 0))
		return -1;
	return work.sum;
}

static int answer(void) { return 42; }
*/
import "C"

import (
	"flag"

	"schedtrace.test/internal/protocol"
)

//export cgohelloAdd
func cgohelloAdd(a, b C.int) C.int {
	return a + b
}

func caller(n int, done chan<- int) {
	done <- int(C.callbacks(C.int(n)))
}

func main() {
	n := flag.Int("n", 1009, "calls from C's thread into Go")
	flag.Parse()
	protocol.Ready(protocol.Facts{"n": *n})
	done := make(chan int)
	go caller(*n, done)
	want := 0
	for i := 0; i < *n; i++ {
		want += i % 7
	}
	if got := <-done; got != want {
		panic("callbacks were lost")
	}
	protocol.Done(protocol.Facts{"n": *n, "callbacks": *n, "answer": int(C.answer())})
}
