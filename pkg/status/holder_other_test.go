//go:build !linux

package status

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func checkHolder(t *testing.T, e *BindError) { require.Nil(t, e.Holder) }
