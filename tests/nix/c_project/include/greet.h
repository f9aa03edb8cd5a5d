/* Says a word to somebody, with a full stop. */
void greet(const char *word, const char *whom, const char *end);
