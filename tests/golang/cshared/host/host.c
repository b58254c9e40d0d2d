/* Loads the shared library named by its first argument and calls Serve(n) in it; n is the second argument. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
	if (argc != 3) {
		fprintf(stderr, "usage: host LIBRARY N\n");
		return 2;
	}
	void *library = dlopen(argv[1], RTLD_NOW);
	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	void (*serve)(int) = (void (*)(int))dlsym(library, "Serve");
	if (!serve) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	serve(atoi(argv[2]));
	return 0;
}
