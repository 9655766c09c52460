package status

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// maxEngineBody bounds the body of an engine route. Dynamo's web framework has
// the same default.
const maxEngineBody = 2 << 20

// EngineRoute answers one route below [EnginePrefix]. body is valid JSON, "{}"
// when the request had none; the answer is encoded as JSON. An error is told
// to the caller with status 500. ctx ends with the request or with the server.
type EngineRoute func(ctx context.Context, body json.RawMessage) (answer any, err error)

// HandleEngine makes the server answer EnginePrefix+path, for any method, with
// f, in place of what answered there before; a nil f removes the route.
func (s *Server) HandleEngine(path string, f EngineRoute) {
	path = strings.TrimPrefix(path, "/")
	s.mu.Lock()
	defer s.mu.Unlock()
	if f == nil {
		delete(s.engine, path)
		return
	}
	if s.engine == nil {
		s.engine = make(map[string]EngineRoute)
	}
	s.engine[path] = f
}

// AdminRoute is an engine route that does something to the worker.
type AdminRoute struct {
	// Do answers it.
	Do EngineRoute
	// LocalOnly refuses callers from other hosts with status 403. A caller that
	// comes from the very address that it calls is local, too.
	LocalOnly bool
}

// HandleAdmin is like HandleEngine for a route that must not be taken by
// accident: anything but POST, a probe's GET say, is answered with 405 and
// changes nothing. Dynamo's own engine routes take any method.
func (s *Server) HandleAdmin(path string, route AdminRoute) {
	path = strings.TrimPrefix(path, "/")
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.admin == nil {
		s.admin = make(map[string]AdminRoute)
	}
	s.admin[path] = route
}

// refuseAdmin answers a request that may not take the route.
func (s *Server) refuseAdmin(w http.ResponseWriter, r *http.Request, route AdminRoute) (refused bool) {
	switch {
	case r.Method != http.MethodPost:
		w.Header().Set("Allow", http.MethodPost)
		writeJSON(w, http.StatusMethodNotAllowed, engineError{"Method not allowed", "this route changes the worker; use POST"})
	case route.LocalOnly && !fromHere(r):
		writeJSON(w, http.StatusForbidden, engineError{"Forbidden", "this route is for callers on the worker's own host"})
	default:
		return false
	}
	return true
}

// fromHere reports whether a request comes over loopback or from the address
// that it was sent to.
func fromHere(r *http.Request) bool {
	from, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return false
	}
	if from.Addr().Unmap().IsLoopback() {
		return true
	}
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if local == nil {
		return false
	}
	to, err := netip.ParseAddrPort(local.String())
	return err == nil && to.Addr().Unmap() == from.Addr().Unmap()
}

// engineError is the body of a failed engine route, as recorded.
type engineError struct {
	Error   string `json:"error"`
	Message string `json:"message"`
}

// serveEngine answers in the order of Dynamo 1.6.1: a body that is no JSON is
// refused before the route is looked up.
func (s *Server) serveEngine(w http.ResponseWriter, r *http.Request, path string) {
	s.mu.RLock()
	admin, isAdmin := s.admin[path]
	s.mu.RUnlock()
	if isAdmin && s.refuseAdmin(w, r, admin) {
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxEngineBody))
	if err != nil {
		if tooLarge := (*http.MaxBytesError)(nil); errors.As(err, &tooLarge) {
			writeJSON(w, http.StatusRequestEntityTooLarge, engineError{"Body too large",
				fmt.Sprintf("the body has more than %d bytes", tooLarge.Limit)})
			return
		}
		writeJSON(w, http.StatusBadRequest, engineError{"Invalid body", err.Error()})
		return
	}
	if len(body) == 0 {
		body = []byte("{}")
	}
	if err := json.Unmarshal(body, new(json.RawMessage)); err != nil {
		writeJSON(w, http.StatusBadRequest, engineError{"Invalid JSON", err.Error()})
		return
	}
	s.mu.RLock()
	route := s.engine[path]
	s.mu.RUnlock()
	if isAdmin {
		route = admin.Do
	}
	if route == nil {
		writeJSON(w, http.StatusNotFound, engineError{"Route not found", "Route " + EnginePrefix + path + " not found"})
		return
	}
	answer, err := route(r.Context(), body)
	if err != nil {
		s.log.Warn().Err(err).Str("route", path).Msg("engine route failed")
		writeJSON(w, http.StatusInternalServerError, engineError{"Handler error", err.Error()})
		return
	}
	writeJSON(w, http.StatusOK, answer)
}
