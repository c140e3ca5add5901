/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* Checks for the test programs. A program returns the number of its failed checks. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>

static int failures;

#define check(condition)                                                                           \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			printf("line %d: %s (errno %d)\n", __LINE__, #condition, errno);           \
			failures++;                                                                \
		}                                                                                  \
	} while (0)

/* Returns the number of open descriptors plus three: opendir()'s descriptor, "." and "..". */
static int descriptors(void)
{
	int number = 0;
	DIR *all = opendir("/proc/self/fd");

	while (readdir(all))
		number++;
	closedir(all);
	return number;
}
