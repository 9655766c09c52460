// Package ingress turns the messages of Dynamo's request planes into Deliveries and answers each of them.
//
// The planes themselves are sub-packages: natsplane (a queue subscription per endpoint) and tcpplane (a listener with persistent connections).
// Both do the same with a message: read the control header, ask the Admitter for a permit, reply, and only then let the work begin. What they share is here.
//
// A frontend takes every reply for acceptance except the two refusals of package wire, and then waits for the worker's call-home without any time limit.
// Hence the rule that the code here serves: a message whose control header can be read is either refused in the reply or handed to the Admitter, also when
// its body is damaged, because only a call-home can then tell the caller; a message whose control header cannot be read is refused.
//
// Intake and Delivery may be used from several goroutines. A Delivery belongs to the Admitter once Admit was called with it.
package ingress
