package redact

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestURLs(t *testing.T) {
	for in, want := range map[string]string{
		"":                               "",
		"nats://localhost:4222":          "nats://localhost:4222",
		"nats://user:pw@host:4222":       "nats://<secret>@host:4222",
		"nats://token@host":              "nats://<secret>@host",
		"nats://u:p@ss/w@host:1":         "nats://<secret>@host:1",
		"a http://u:p@h b tls://x:y@z c": "a http://<secret>@h b tls://<secret>@z c",
		"nats://a:x,y@h1,nats://c:d@h2":  "nats://<secret>@h2",
		"mail someone@example.org":       "mail someone@example.org",
	} {
		require.Equal(t, want, URLs(in), in)
	}
}

func TestAddress(t *testing.T) {
	for in, want := range map[string]string{
		"127.0.0.1:2379":          "127.0.0.1:2379",
		"root:pw@127.0.0.1:2379":  "<secret>@127.0.0.1:2379",
		"http://root:p@w@etcd:23": "http://<secret>@etcd:23",
		"":                        "",
	} {
		require.Equal(t, want, Address(in), in)
	}
}

func TestSecretName(t *testing.T) {
	for _, name := range []string{"HF_TOKEN", "--hf-token", "db.password", "OPENAI_API_KEY", "api-key", "AWS_SECRET_ACCESS_KEY", "aws_session_token", "nats_seed", "apikey", "NATS_AUTH_NKEY"} {
		require.True(t, SecretName(name), name)
	}
	for _, name := range []string{"max_num_tokens", "tokenizer", "token_delay", "eos_token_id", "seed", "monkey", "key", "token_budget", "tls.key_file", "HF_TOKEN_PATH", ""} {
		require.False(t, SecretName(name), name)
	}
}

func TestArgs(t *testing.T) {
	in := []string{"serve", "--token", "hush", "--token=hush", "HF_TOKEN=hush", "--url", "http://u:hush@h", "--max-tokens", "5", "--secret", "--next"}
	out := Args(in)
	require.Equal(t, []string{"serve", "--token", Mark, "--token=" + Mark, "HF_TOKEN=" + Mark, "--url", "http://<secret>@h", "--max-tokens", "5", "--secret", "--next"}, out)
	require.Equal(t, "hush", in[2], "the input is untouched")
	require.NotContains(t, strings.Join(out, " "), "hush")
}
