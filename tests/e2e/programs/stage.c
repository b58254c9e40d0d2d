/*
 * stage PROGRAM [ARGUMENT...] becomes PROGRAM with the FIFOs /control/in and /control/out as its standard input and
 * output, so that a test can talk to a program in a container without the runtime's streaming server. It is no Go, so
 * that a Go program alone runs in the container.
 */
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    (void)argc;
    int in = open("/control/in", O_RDONLY), out = open("/control/out", O_WRONLY);
    if (in < 0 || out < 0 || dup2(in, 0) < 0 || dup2(out, 1) < 0) {
        perror("stage: /control");
        return 1;
    }
    close(in);
    close(out);
    execv(argv[1], argv + 1);
    perror(argv[1]);
    return 1;
}
