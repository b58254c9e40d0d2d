module schedtrace.test

go 1.19
