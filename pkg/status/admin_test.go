package status

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestAdminRoutesAreNotTakenByAccident(t *testing.T) {
	s := serve(t, Config{})
	taken := 0
	route := AdminRoute{Do: func(context.Context, json.RawMessage) (any, error) {
		taken++
		return map[string]int{"taken": taken}, nil
	}}
	s.HandleAdmin("/control/drain", route)
	for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodPut, http.MethodDelete} {
		a := ask(t, s, method, "/engine/control/drain", "")
		require.Equal(t, http.StatusMethodNotAllowed, a.code, method)
		require.Equal(t, http.MethodPost, a.header.Get("Allow"))
	}
	require.Equal(t, http.StatusBadRequest, ask(t, s, http.MethodPost, "/engine/control/drain", "{").code)
	require.Zero(t, taken)
	a := ask(t, s, http.MethodPost, "/engine/control/drain", "")
	require.Equal(t, http.StatusOK, a.code)
	require.JSONEq(t, `{"taken":1}`, a.body)
	route.LocalOnly = true
	s.HandleAdmin("control/drain", route)
	require.Equal(t, http.StatusOK, ask(t, s, http.MethodPost, "/engine/control/drain", "{}").code)
}

func TestOnlyLocalCallersPass(t *testing.T) {
	s := serve(t, Config{})
	s.HandleAdmin("control/drain", AdminRoute{LocalOnly: true, Do: func(context.Context, json.RawMessage) (any, error) { return "done", nil }})
	for _, c := range []struct {
		from, to string
		want     int
	}{
		{"127.0.0.1:5", "127.0.0.1:9090", 200},
		{"[::1]:5", "[::1]:9090", 200},
		{"[::ffff:127.0.0.1]:5", "127.0.0.1:9090", 200},
		{"10.0.0.7:5", "10.0.0.7:9090", 200},
		{"10.0.0.8:5", "10.0.0.7:9090", 403},
		{"10.0.0.8:5", "", 403},
		{"@", "10.0.0.7:9090", 403},
	} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/engine/control/drain", nil)
		r.RemoteAddr = c.from
		if c.to != "" {
			to, err := net.ResolveTCPAddr("tcp", c.to)
			require.NoError(t, err)
			r = r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, net.Addr(to)))
		}
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		require.Equal(t, c.want, w.Code, "%+v", c)
	}
}
