// Hello: as small as a Go program gets that still speaks the protocol; it has no package but os.
package main

import "os"

func expect(word string) {
	got := make([]byte, 0, 8)
	one := make([]byte, 1)
	for {
		if n, err := os.Stdin.Read(one); n == 0 || err != nil {
			os.Exit(0)
		}
		if one[0] == '\n' {
			break
		}
		got = append(got, one[0])
	}
	if string(got) != word {
		os.Exit(1)
	}
}

func main() {
	os.Stdout.WriteString("{\"event\":\"ready\"}\n")
	expect("go")
	done := make(chan string)
	go greet(done)
	os.Stdout.WriteString("{\"event\":\"done\",\"greeting\":\"" + <-done + "\"}\n")
	expect("exit")
}

func greet(done chan<- string) {
	done <- "hello"
}
