// Package tracing writes Go's execution trace of a workload's work, for a test to compare with.
package tracing

import (
	"os"
	"runtime/trace"

	"schedtrace.test/internal/protocol"
)

// Start begins the trace and returns what ends it. With an empty name there is none.
func Start(name string) (stop func()) {
	if name == "" {
		return func() {}
	}
	file, err := os.Create(name)
	if err == nil {
		err = trace.Start(file)
	}
	if err != nil {
		protocol.Fail(err)
	}
	return func() {
		trace.Stop()
		file.Close()
	}
}
