#include <stdio.h>

#include "greet.h"

void greet(const char *word, const char *whom, const char *end)
{
    printf("%s, %s.%s", word, whom, end);
}
