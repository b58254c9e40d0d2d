// Httpserver answers "/" with two bytes, so that there is nothing to measure but net/http and the scheduler, and
// "/order?id=N" with a small JSON document, as the least of real services does.
//
// It prints its address when it listens, and ends when its standard input does. Go's execution trace of it can be had as
// of any server, at /debug/pprof/trace.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	_ "net/http/pprof"
	"os"
	"strconv"
)

type item struct {
	Name  string  `json:"name"`
	Count int     `json:"count"`
	Price float64 `json:"price"`
}

type order struct {
	ID    int    `json:"id"`
	Items []item `json:"items"`
}

func answerOrder(w http.ResponseWriter, r *http.Request) {
	id, err := strconv.Atoi(r.URL.Query().Get("id"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	found := order{ID: id}
	for i := 1; i <= 5; i++ {
		found.Items = append(found.Items, item{Name: "item " + strconv.Itoa(id+i), Count: i, Price: 9.75 * float64(i)})
	}
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(found)
}

func main() {
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
	http.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { w.Write(answer) })
	http.HandleFunc("/order", answerOrder)
	fmt.Fprintln(os.Stderr, http.Serve(listener, nil))
	os.Exit(1)
}
