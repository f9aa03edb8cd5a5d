#include <greet.h>

int main(int argc, char **argv)
{
    greet("Bye", argc > 1 ? argv[1] : "world", "\n");
    return 0;
}
