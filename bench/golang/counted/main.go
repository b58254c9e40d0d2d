// Counted does work without end and counts it in a file of eight bytes, which others can map: -work http answers requests
// with two bytes, -work pingpong sends over unbuffered channels between as many pairs of goroutines as there are Ps.
//
// It prints its address, or "-", when it has begun, and ends when its standard input does. With -wait, pingpong works only
// after the first line; with -rate, it makes so many round trips a second, in turns of a millisecond, by one pair.
package main

import (
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

func main() {
	work := flag.String("work", "http", "http or pingpong")
	name := flag.String("count", "", "file of eight bytes")
	wait := flag.Bool("wait", false, "begin after a line of standard input")
	rate := flag.Int("rate", 0, "round trips a second; 0: as many as can be, of a pair for each P")
	flag.Parse()
	file, err := os.OpenFile(*name, os.O_RDWR, 0)
	fail(err)
	memory, err := syscall.Mmap(int(file.Fd()), 0, 8, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	fail(err)
	count := (*uint64)(unsafe.Pointer(&memory[0]))
	begin := make(chan bool)
	if !*wait {
		close(begin)
	}
	go func() {
		if *wait {
			os.Stdin.Read(make([]byte, 8))
			close(begin)
		}
		io.Copy(io.Discard, os.Stdin)
		os.Exit(0)
	}()
	if *work == "pingpong" {
		pairs := runtime.GOMAXPROCS(0)
		if *rate > 0 {
			pairs = 1
		}
		for i := 0; i < pairs; i++ {
			there, back := make(chan int), make(chan int)
			go func() {
				for n := range there {
					back <- n
				}
			}()
			go func() {
				<-begin
				began := time.Now()
				for n := 1; ; n++ {
					there <- 1
					<-back
					atomic.AddUint64(count, 1)
					if *rate > 0 && n%(*rate/1000) == 0 {
						time.Sleep(time.Until(began.Add(time.Second * time.Duration(n) / time.Duration(*rate))))
					}
				}
			}()
		}
		fmt.Println("-")
		select {}
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	fail(err)
	fmt.Println(listener.Addr())
	answer := []byte("ok")
	fail(http.Serve(listener, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Write(answer)
		atomic.AddUint64(count, 1)
	})))
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
