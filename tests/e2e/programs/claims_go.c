/* Does nothing, and has a section .go.buildinfo of the bytes CONTENT. */
#include <unistd.h>

__attribute__((section(".go.buildinfo"), aligned(16), used)) static unsigned char information[] = {CONTENT};

int main(void)
{
    for (;;)
        pause();
}
