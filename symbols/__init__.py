"""What is in a Go executable's file: segments, symbols, build facts. Pure reading; nothing here touches a process."""
