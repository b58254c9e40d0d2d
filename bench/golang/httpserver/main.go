// Httpserver answers every request with two bytes: all there is to measure is net/http and the scheduler.
//
// It prints its address when it listens, and ends when its standard input does.
package main

import (
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
)

func main() {
	procs := flag.Int("procs", 1, "GOMAXPROCS")
	flag.Parse()
	runtime.GOMAXPROCS(*procs)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(listener.Addr())
	go func() {
		io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	answer := []byte("ok")
	handler := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write(answer) })
	fmt.Fprintln(os.Stderr, http.Serve(listener, handler))
	os.Exit(1)
}
