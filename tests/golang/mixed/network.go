package main

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"schedtrace.test/internal/protocol"
)

// echo is a TCP server on the loopback interface that sends back what it gets.
type echo struct {
	listener net.Listener
	serving  sync.WaitGroup
}

// listen opens the port; the server's goroutine starts with the first client, which is after "go".
func listen() *echo {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		protocol.Fail(err)
	}
	return &echo{listener: listener}
}

func (e *echo) accept() net.Conn {
	connected, err := net.Dial("tcp", e.listener.Addr().String())
	if err != nil {
		protocol.Fail(err)
	}
	accepted, err := e.listener.Accept()
	if err != nil {
		protocol.Fail(err)
	}
	e.serving.Add(1)
	go func() { e.serve(accepted) }()
	return connected
}

func (e *echo) serve(connection net.Conn) {
	defer e.serving.Done()
	defer connection.Close()
	buffer := make([]byte, 64)
	for {
		n, err := connection.Read(buffer)
		if err != nil {
			return
		}
		if _, err := connection.Write(buffer[:n]); err != nil {
			return
		}
	}
}

// close waits until every connection has been closed by its client and the goroutine serving it has ended.
func (e *echo) close() {
	e.serving.Wait()
	e.listener.Close()
}

// client sends and awaits the echo, one short message at a time.
func client() {
	defer w.wait.Done()
	connection := server.accept()
	defer connection.Close()
	message := []byte("sixteen bytes ..")
	answer := make([]byte, len(message))
	for w.running() {
		for i := 0; i < 10; i++ {
			if _, err := connection.Write(message); err != nil {
				protocol.Fail(err)
			}
			if _, err := io.ReadFull(connection, answer); err != nil {
				protocol.Fail(err)
			}
			atomic.AddInt64(&w.exchanges, 1)
		}
		time.Sleep(pace)
	}
}
