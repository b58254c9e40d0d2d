//go:build cgo

package main

/*
static int answer(int n) { return n + 1; }
*/
import "C"

func init() {
	extra = 1
	called = func() {
		if C.answer(41) != 42 {
			panic("C answers otherwise")
		}
	}
}
