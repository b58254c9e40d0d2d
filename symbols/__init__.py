"""What a Go executable says about itself: its functions, its Go version, the layout of its runtime's structs."""
