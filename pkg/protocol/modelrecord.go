package protocol

// ModelRecord is the record that announces a model.
type ModelRecord struct {
	Namespace, Component, Endpoint string
	InstanceID                     uint64
	Card                           Card
	// Suffix is the slug of a LoRA adapter, empty for a base model.
	Suffix string
}

// Key is where the record lives in etcd.
func (m *ModelRecord) Key() string { panic("not yet") }

// Value is the record's JSON, the same bytes every time.
func (m *ModelRecord) Value() []byte { panic("not yet") }

// ParseModelRecord reads a record's value.
func ParseModelRecord(value []byte) (ModelRecord, error) { panic("not yet") }

// Slugify makes a model's name fit for paths.
func Slugify(name string) string { panic("not yet") }
