// Counted does work without end and counts it in a file of eight bytes, which others can map: it sends over unbuffered
// channels between as many pairs of goroutines as there are Ps, a unit a round trip; or with -goroutines it wakes so
// many by turns, which wait again at once, a unit each.
//
// It prints a line when all goroutines are there, and ends when its standard input does. With -wait it works only after
// the first line of that; with -rate, it makes so many round trips a second, in turns of a millisecond, by one pair.
package main

import (
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

func main() {
	name := flag.String("count", "", "file of eight bytes")
	wait := flag.Bool("wait", false, "begin after a line of standard input")
	rate := flag.Int("rate", 0, "round trips a second; 0: as many as can be, of a pair for each P")
	goroutines := flag.Int("goroutines", 0, "to wake by turns")
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
	if *goroutines > 0 {
		byTurns(count, *goroutines, begin)
	} else {
		pairs := runtime.GOMAXPROCS(0)
		if *rate > 0 {
			pairs = 1
		}
		for i := 0; i < pairs; i++ {
			roundTrips(count, *rate, begin)
		}
	}
	fmt.Println("ready")
	select {}
}

func roundTrips(count *uint64, rate int, begin chan bool) {
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
			if rate > 0 && n%(rate/1000) == 0 {
				time.Sleep(time.Until(began.Add(time.Second * time.Duration(n) / time.Duration(rate))))
			}
		}
	}()
}

func byTurns(count *uint64, goroutines int, begin chan bool) {
	waiting := make([]chan int, goroutines)
	for i := range waiting {
		one := make(chan int) // each has its own, so that it can be woken alone
		waiting[i] = one
		go func() {
			for range one {
				atomic.AddUint64(count, 1)
			}
		}()
	}
	go func() {
		<-begin
		for {
			for _, one := range waiting {
				one <- 1
			}
		}
	}()
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
