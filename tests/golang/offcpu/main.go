// Offcpu: goroutines that run for Go while their thread is off the CPU, in three ways. For -duration work
//
//   - -compute goroutines that compute, and now and then wait for each other,
//   - -allocate goroutines that make garbage, so that the collector works beside them,
//   - -raw goroutines that sleep for -sleep in the kernel, by system calls that the runtime doesn't know of,
//   - -fault goroutines that touch pages of a file that are not in memory.
//
// Done tells how many raw sleeps there were, and how many pages were touched.
package main

import (
	"flag"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"schedtrace.test/internal/protocol"
)

const pageSize, pages = 4096, 2048

var (
	until  time.Time
	raws   int64
	faults int64
	sink   []byte
)

func compute(beat chan int, wait *sync.WaitGroup) {
	defer wait.Done()
	x := uint64(88172645463325252)
	for time.Now().Before(until) {
		for i := 0; i < 300000; i++ {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
		}
		select {
		case beat <- int(x & 1):
		default:
		}
		select {
		case <-beat:
		case <-time.After(time.Duration(x % 300000)):
		}
	}
}

func allocate(wait *sync.WaitGroup) {
	defer wait.Done()
	var kept [64][]byte
	for n := 0; time.Now().Before(until); n++ {
		kept[n%len(kept)] = make([]byte, 64<<10)
	}
	sink = kept[0]
}

func raw(sleep time.Duration, wait *sync.WaitGroup) {
	defer wait.Done()
	spec := syscall.NsecToTimespec(int64(sleep))
	for time.Now().Before(until) {
		syscall.RawSyscall(syscall.SYS_NANOSLEEP, uintptr(unsafe.Pointer(&spec)), 0, 0)
		atomic.AddInt64(&raws, 1)
		runtime.Gosched()
	}
}

func fault(file *os.File, wait *sync.WaitGroup) {
	defer wait.Done()
	content, err := syscall.Mmap(int(file.Fd()), 0, pages*pageSize, syscall.PROT_READ, syscall.MAP_SHARED)
	if err != nil {
		protocol.Fail(err)
	}
	if err := syscall.Madvise(content, syscall.MADV_RANDOM); err != nil {
		protocol.Fail(err)
	}
	sum := byte(0)
	for time.Now().Before(until) {
		if err := syscall.Madvise(content, syscall.MADV_DONTNEED); err != nil {
			protocol.Fail(err)
		}
		const dontNeed = 4 // POSIX_FADV_DONTNEED
		syscall.Syscall6(syscall.SYS_FADVISE64, file.Fd(), 0, 0, dontNeed, 0, 0)
		for i := 0; i < pages && time.Now().Before(until); i++ {
			sum += content[i*pageSize]
			atomic.AddInt64(&faults, 1)
		}
	}
	sink = []byte{sum}
}

func main() {
	computing := flag.Int("compute", 0, "goroutines that compute")
	allocating := flag.Int("allocate", 0, "goroutines that make garbage")
	sleeping := flag.Int("raw", 0, "goroutines that sleep in the kernel")
	faulting := flag.Int("fault", 0, "goroutines that touch pages that are not in memory")
	sleep := flag.Duration("sleep", 2*time.Millisecond, "of each raw sleep")
	procs := flag.Int("procs", runtime.NumCPU(), "GOMAXPROCS")
	duration := flag.Duration("duration", time.Second, "how long they work")
	flag.Parse()
	runtime.GOMAXPROCS(*procs)
	file, err := os.CreateTemp(".", "offcpu")
	if err != nil {
		protocol.Fail(err)
	}
	os.Remove(file.Name())
	if _, err := file.Write(make([]byte, pages*pageSize)); err != nil {
		protocol.Fail(err)
	}
	if err := file.Sync(); err != nil {
		protocol.Fail(err)
	}

	protocol.Ready(nil)
	until = time.Now().Add(*duration)
	var wait sync.WaitGroup
	wait.Add(*computing + *allocating + *sleeping + *faulting)
	beat := make(chan int, 1)
	for i := 0; i < *computing; i++ {
		go compute(beat, &wait)
	}
	for i := 0; i < *allocating; i++ {
		go allocate(&wait)
	}
	for i := 0; i < *sleeping; i++ {
		go raw(*sleep, &wait)
	}
	for i := 0; i < *faulting; i++ {
		go fault(file, &wait)
	}
	wait.Wait()
	runtime.GC() // what is left of a collection that has begun is not left to the background
	protocol.Done(protocol.Facts{"raws": atomic.LoadInt64(&raws), "faults": atomic.LoadInt64(&faults)})
}
