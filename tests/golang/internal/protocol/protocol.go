// Package protocol is how a workload and a test talk: JSON lines out, one word a line in.
//
//	workload -> {"event":"ready","pid":...,...}   started, nothing of the work begun
//	test     -> go                                the test has attached
//	workload -> {"event":"done",...}              the work is over; exact facts about it
//	test     -> exit                              the test has detached
//
// The end of standard input at any point ends the workload: it does not outlive its test.
package protocol

import (
	"encoding/json"
	"os"
	"runtime"
	"time"
)

// Facts is what a line tells besides its event.
type Facts map[string]any

// Ready announces the process and waits until the test says "go".
func Ready(facts Facts) {
	line := Facts{
		"pid":        os.Getpid(),
		"go":         runtime.Version(),
		"gomaxprocs": runtime.GOMAXPROCS(0),
	}
	for key, value := range facts {
		line[key] = value
	}
	say("ready", line)
	expect("go")
}

// Done tells the facts and waits until the test says "exit"; it does not return.
func Done(facts Facts) {
	say("done", facts)
	expect("exit")
	os.Exit(0)
}

// Fail tells what went wrong and ends the process.
func Fail(err error) {
	say("failed", Facts{"error": err.Error()})
	os.Exit(1)
}

func say(event string, facts Facts) {
	line := Facts{"event": event}
	for key, value := range facts {
		line[key] = value
	}
	text, err := json.Marshal(line)
	if err != nil {
		panic(err)
	}
	os.Stdout.Write(append(text, '\n'))
}

func expect(word string) {
	var line []byte
	var one [1]byte
	for {
		n, err := os.Stdin.Read(one[:])
		if err != nil || n == 0 {
			os.Exit(0)
		}
		if one[0] == '\n' {
			break
		}
		line = append(line, one[0])
	}
	if string(line) != word {
		say("failed", Facts{"error": "expected " + word + ", got " + string(line)})
		os.Exit(1)
	}
}

// Elapsed is the time since start in seconds.
func Elapsed(start time.Time) float64 {
	return time.Since(start).Seconds()
}
