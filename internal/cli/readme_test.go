package cli

import (
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"dynworker/pkg/config"

	"github.com/stretchr/testify/require"
)

// TestTheReadmesSettingsExist holds the README's table to the table of keys: key, variable and default.
func TestTheReadmesSettingsExist(t *testing.T) {
	text, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	_, table, found := strings.Cut(string(text), "## Settings")
	require.True(t, found)
	table, _, _ = strings.Cut(table, "\n## ")
	var variables []string
	for _, v := range config.Variables() {
		variables = append(variables, v.Name)
	}
	_, report, _ := config.Load(nil, nil, nil)
	row := regexp.MustCompile("(?m)^\\| `([a-z_.*]+)` \\| (?:`([A-Z_*]+)`|–) \\| ([^|]*) \\|")
	rows := row.FindAllStringSubmatch(table, -1)
	require.Greater(t, len(rows), 10)
	for _, r := range rows {
		key, variable, value := r[1], r[2], strings.Trim(strings.TrimSpace(r[3]), "`")
		prefix, isGroup := strings.CutSuffix(key, "*")
		require.True(t, slices.ContainsFunc(config.Keys(), func(k string) bool { return k == key || isGroup && strings.HasPrefix(k, prefix) }), key)
		name, isGroup := strings.CutSuffix(variable, "*")
		require.True(t, variable == "" || slices.ContainsFunc(variables, func(v string) bool { return v == variable || isGroup && strings.HasPrefix(v, name) }), variable)
		if setting, ok := report.Lookup(key); ok && strings.HasPrefix(strings.TrimSpace(r[3]), "`") {
			value, _, _ = strings.Cut(value, "`")
			require.Contains(t, []string{setting.Value, strings.Trim(setting.Value, "[]")}, strings.TrimSpace(value), key)
		}
	}
}
