"""What a Go executable's file says: segments, symbols, build facts. Nothing here touches a process."""
