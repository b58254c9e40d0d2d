// Load sends requests to a server over a number of connections, each of which waits for an answer before it sends the
// next: at a fixed rate, or, with -rate 0, as many as are answered.
//
// HTTP: those of -requests, a JSON array of [method, path, body], by turns. NATS (-nats): a message to a subject that
// the connection has subscribed to itself, answered when it comes back. Latencies count from when a request was to be
// sent, so that one that is late since the one before took long is as slow as it was for whoever waited for it. With
// -count it adds up answers in a file of eight bytes, which others can map. At the end it prints one line of JSON.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sort"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// An exchange sends request n of a connection and reads its answer.
type exchange func(n int) error

func overHTTP(connection net.Conn, requests [][3]string) exchange {
	var texts []string
	var asked []*http.Request
	for _, one := range requests {
		asked = append(asked, &http.Request{Method: one[0]}) // an answer to HEAD has no body
		texts = append(texts, fmt.Sprintf("%s %s HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\n\r\n%s",
			one[0], one[1], connection.RemoteAddr(), len(one[2]), one[2]))
	}
	reader := bufio.NewReader(connection)
	return func(n int) error {
		if _, err := io.WriteString(connection, texts[n%len(texts)]); err != nil {
			return err
		}
		answer, err := http.ReadResponse(reader, asked[n%len(texts)])
		if err != nil {
			return err
		}
		if answer.StatusCode != http.StatusOK {
			return fmt.Errorf("status %s", answer.Status)
		}
		_, err = io.Copy(io.Discard, answer.Body)
		return err
	}
}

func overNATS(connection net.Conn, number int) exchange {
	reader := bufio.NewReader(connection)
	payload := strings.Repeat("x", 128)
	subject := "bench." + strconv.Itoa(number)
	message := fmt.Sprintf("PUB %s %d\r\n%s\r\n", subject, len(payload), payload)
	_, err := fmt.Fprintf(connection, "CONNECT {\"verbose\":false,\"pedantic\":false}\r\nSUB %s 1\r\n", subject)
	fail(err)
	return func(int) error {
		if _, err := io.WriteString(connection, message); err != nil {
			return err
		}
		for {
			line, err := reader.ReadString('\n')
			switch {
			case err != nil:
				return err
			case strings.HasPrefix(line, "MSG "):
				_, err = reader.Discard(len(payload) + 2)
				return err
			case strings.HasPrefix(line, "PING"):
				if _, err = io.WriteString(connection, "PONG\r\n"); err != nil {
					return err
				}
			case strings.HasPrefix(line, "-ERR"):
				return fmt.Errorf("the server says %q", line)
			}
		}
	}
}

func main() {
	address := flag.String("address", "", "host:port")
	requestsText := flag.String("requests", `[["GET","/",""]]`, "of HTTP")
	nats := flag.Bool("nats", false, "speak NATS")
	connections := flag.Int("connections", 32, "")
	rate := flag.Float64("rate", 0, "requests a second over all connections; 0: as many as are answered")
	duration := flag.Duration("duration", time.Second, "how long to send")
	name := flag.String("count", "", "file of eight bytes")
	flag.Parse()
	var requests [][3]string
	fail(json.Unmarshal([]byte(*requestsText), &requests))
	count := new(uint64)
	if *name != "" {
		file, err := os.OpenFile(*name, os.O_RDWR, 0)
		fail(err)
		memory, err := syscall.Mmap(int(file.Fd()), 0, 8, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
		fail(err)
		count = (*uint64)(unsafe.Pointer(&memory[0]))
	}
	var exchanges []exchange
	for i := 0; i < *connections; i++ {
		connection, err := net.Dial("tcp", *address)
		fail(err)
		if *nats {
			exchanges = append(exchanges, overNATS(connection, i))
		} else {
			exchanges = append(exchanges, overHTTP(connection, requests))
		}
	}
	latencies := make([][]float64, len(exchanges))
	var wait sync.WaitGroup
	began := time.Now()
	for i, send := range exchanges {
		wait.Add(1)
		go func(i int, send exchange) {
			defer wait.Done()
			for n := 0; ; n++ {
				planned := time.Now()
				if *rate > 0 {
					planned = began.Add(time.Duration(float64(n*len(exchanges)+i) / *rate * float64(time.Second)))
					time.Sleep(time.Until(planned))
				}
				if planned.Sub(began) >= *duration {
					return
				}
				fail(send(n))
				atomic.AddUint64(count, 1)
				latencies[i] = append(latencies[i], time.Since(planned).Seconds())
			}
		}(i, send)
	}
	wait.Wait()
	seconds := time.Since(began).Seconds()
	var all []float64
	for _, some := range latencies {
		all = append(all, some...)
	}
	sort.Float64s(all)
	fail(json.NewEncoder(os.Stdout).Encode(map[string]interface{}{
		"answers": len(all), "seconds": seconds, "p50": all[len(all)/2], "p99": all[len(all)*99/100],
	}))
}

func fail(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "load:", err)
		os.Exit(1)
	}
}
