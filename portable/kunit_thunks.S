/* SPDX-License-Identifier: GPL-2.0 OR BSD-3-Clause */
/* The tests are a module of their own. */
#include "thunks.S"
