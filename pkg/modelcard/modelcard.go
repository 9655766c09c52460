// Package modelcard turns a model folder into what frontends are told about
// it: the model card with name, size and BLAKE3 checksum of every file they
// need, and an HTTP handler that serves exactly those bytes.
//
// A [Model] is read once, by [Load]. The bytes that were hashed are kept in
// memory and served from there, so that a file which is edited, replaced or
// removed later can never disagree with the checksum in the card; [Options]
// bounds how much that may be. Weights are never read. With the model in hand,
// [Model.Card] builds the card for a [Spec] and [Model.Handler] serves the
// files under the URLs that the card names. Both may be called any number of
// times and from many goroutines; a Model never changes.
//
// What is missing in a folder is an [*Error] that says what a frontend would
// make of it, because frontends retry such models in silence for ever.
package modelcard
