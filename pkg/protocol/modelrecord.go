package protocol

import (
	"strings"
)

// ModelRecord is the record that announces a model. Its instance id is that of
// the instance record; the frontend joins the two by it.
type ModelRecord struct {
	Namespace, Component, Endpoint string
	InstanceID                     uint64
	Card                           Card
	// Suffix is the slug of a LoRA adapter, empty for a base model.
	Suffix string
}

const typeModel = "Model"

type modelJSON struct {
	Type       string `json:"type"`
	Namespace  string `json:"namespace"`
	Component  string `json:"component"`
	Endpoint   string `json:"endpoint"`
	InstanceID uint64 `json:"instance_id"`
	Card       *Card  `json:"card_json"`
	Suffix     string `json:"model_suffix,omitempty"`
}

// ModelPrefix is what all keys of model records begin with.
const ModelPrefix = "v1/mdc/"

// Key is where the record lives in etcd. Names are not escaped.
func (m *ModelRecord) Key() string {
	key := ModelPrefix + endpointPath(m.Namespace, m.Component, m.Endpoint, m.InstanceID)
	if m.Suffix != "" {
		key += "/" + m.Suffix
	}
	return key
}

// Value is the record's JSON, the same bytes every time. It panics when a raw
// member of the card is not JSON, which Card.Validate tells beforehand.
func (m *ModelRecord) Value() []byte {
	card := m.Card
	if card.Needs == nil {
		// The frontend takes an empty list, not null.
		card.Needs = [][]string{}
	}
	return recordJSON(modelJSON{
		Type: typeModel, Namespace: m.Namespace, Component: m.Component, Endpoint: m.Endpoint,
		InstanceID: m.InstanceID, Card: &card, Suffix: m.Suffix,
	})
}

// ParseModelRecord reads a record's value. Unknown members are ignored, members
// that are left out have the frontend's defaults. The error is a *RecordError.
func ParseModelRecord(value []byte) (ModelRecord, error) {
	const what = "model record"
	card := Card{RuntimeConfig: defaultRuntimeConfig()}
	in := modelJSON{Card: &card}
	if err := parseRecord(what, value, typeModel, &in.Type, &in); err != nil {
		return ModelRecord{}, err
	}
	if in.Card == nil || in.Card.DisplayName == "" {
		return ModelRecord{}, &RecordError{Record: what, Err: &FieldError{Field: "card_json", Reason: "missing or without display_name"}}
	}
	return ModelRecord{
		Namespace: in.Namespace, Component: in.Component, Endpoint: in.Endpoint,
		InstanceID: in.InstanceID, Card: *in.Card, Suffix: in.Suffix,
	}, nil
}

// Slugify makes a model's name fit for paths: lower case, everything but a-z,
// 0-9, - and _ becomes _, and no _ in front.
func Slugify(name string) string {
	// In full lower case, which the frontend's language has and ours has not,
	// this one letter becomes two characters.
	name = strings.ReplaceAll(name, "\u0130", "i\u0307")
	var b strings.Builder
	for _, r := range strings.ToLower(name) {
		if r >= 'a' && r <= 'z' || r >= '0' && r <= '9' || r == '-' || r == '_' {
			b.WriteRune(r)
		} else {
			b.WriteByte('_')
		}
	}
	return strings.TrimLeft(b.String(), "_")
}
