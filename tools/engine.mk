# Builds the Pulumi CLI and its Python language host into .tools/bin, for tests/engine; `make engine-tools` calls it.
# About four minutes once on two cores, nothing to do after that. Versions are pinned in tools/*/go.mod and go.sum.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:

BIN := .tools/bin
GO ?= go
BUILD = $(GO) -C $(1) build -mod=readonly -trimpath -ldflags "-s -w" -o $(CURDIR)/$@
INSTALLED := $(shell command -v pulumi)
HAVE_GO := $(shell command -v $(GO))

.PHONY: all
ifneq ($(INSTALLED),)
all: ; @echo "The engine test uses the Pulumi CLI on PATH: $(INSTALLED)"
else ifeq ($(HAVE_GO),)
all: ; @echo "No Pulumi CLI on PATH and no Go to build it: the engine test will not run (tests/engine/README.md)." >&2
else
all: $(BIN)/pulumi $(BIN)/pulumi-language-python $(BIN)/pulumi-language-python-exec
endif

$(BIN):
	@mkdir -p $@

$(BIN)/pulumi: tools/pulumi/go.mod tools/pulumi/go.sum | $(BIN)
	@echo "Building the Pulumi CLI (once; about four minutes on two cores) ..."
	@$(call BUILD,tools/pulumi) github.com/pulumi/pulumi/pkg/v3/cmd/pulumi

$(BIN)/pulumi-language-python: tools/pulumi-language-python/go.mod tools/pulumi-language-python/go.sum | $(BIN)
	@echo "Building Pulumi's Python language host (once) ..."
	@$(call BUILD,tools/pulumi-language-python) \
	  github.com/pulumi/pulumi/sdk/v3/python/cmd/pulumi-language-python

# The host runs this program by name; it is a file of the sdk module, read-only and not executable in Go's cache.
$(BIN)/pulumi-language-python-exec: tools/pulumi/go.mod | $(BIN)
	@$(GO) -C tools/pulumi mod download github.com/pulumi/pulumi/sdk/v3
	@install -m 755 "$$($(GO) -C tools/pulumi list -m -f '{{.Dir}}' github.com/pulumi/pulumi/sdk/v3)/python/cmd/pulumi-language-python-exec" $@
