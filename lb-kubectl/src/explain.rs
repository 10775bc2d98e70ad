//! `explain`: the way of a packet from a Pod to a Service, on the Pod's node, on the backend's node, and back.

use std::{net::SocketAddr, time::Duration};

use anyhow::{Context as _, anyhow, ensure};
use indicatif::ProgressBar;
use k8s_openapi::api::{
    core::v1::{Pod, Service},
    discovery::v1::EndpointSlice,
};
use kube::{Api, api::ListParams};
use lb_output::{TableOrJson, print, print_json};
use serde::Serialize;
use serde_json::Value;

use crate::{
    cli::{ClusterArgs, ExplainArgs},
    cluster::{Cluster, within},
    gather,
    target::Packet,
};

/// The answer of `lb-agent explain` on one node. Scripts read the JSON of this type: after the first release, keys may
/// be added, never renamed or removed.
#[derive(Debug, Serialize)]
struct Part {
    node: String,
    /// Which part of the packet's way this answer is about.
    title: &'static str,
    from: String,
    to: SocketAddr,
    /// What `lb-agent explain -o json` prints.
    page: Value,
}

/// A packet as it leaves the program that has handled it, according to a page of `lb-agent explain`.
#[derive(Debug, PartialEq, Eq)]
struct Next {
    /// The source that the backend sees; if `is_masqueraded`, the source before another program replaces it.
    from: String,
    backends: Vec<SocketAddr>,
    /// Whether another program, at tc egress, replaces the source afterwards.
    is_masqueraded: bool,
}

/// Selects a program of a node: `lb-agent explain` must explain how that program handles the packet.
#[derive(Clone, Copy, Debug)]
enum HookChoice<'a> {
    /// The first program that the packet passes on the node.
    First,
    /// The tc egress program of the device by which the packet leaves the node; `None` if the device is unknown.
    Egress(Option<&'a str>),
}

/// Runs `explain`.
///
/// # Errors
/// An object does not exist or cannot be read, the arguments name no packet, or a node on the way has not answered. The
/// answers of the nodes before that node are printed.
pub(crate) async fn explain(cluster_args: &ClusterArgs, args: &ExplainArgs) -> anyhow::Result<()> {
    let bar = gather::waiting();
    bar.set_message("looking for the agents, the Pod and the Service");
    let cluster = Cluster::find(cluster_args).await?;
    let (node, packet) = question(&cluster, args, cluster_args.limit()).await?;
    let mut walk = Walk { cluster: &cluster, limit: cluster_args.limit(), packet, parts: Vec::new(), bar };
    let end = walk.follow(&node, args).await;
    walk.bar.finish_and_clear();
    match args.output {
        TableOrJson::Json => print_json(&walk.parts)?,
        TableOrJson::Table => {
            let parts: Vec<String> = walk.parts.iter().map(Part::text).collect();
            print(&parts.join("\n"))?;
        }
    }
    let end = end?;
    if args.output == TableOrJson::Table {
        print(&format!("\n{end}\n"))?;
    }
    Ok(())
}

/// The Pod's node, and the packet from the Pod to the Service.
async fn question(
    cluster: &Cluster,
    args: &ExplainArgs,
    limit: Duration,
) -> anyhow::Result<(String, Packet)> {
    let (pod, service) = (&args.pod, &args.service);
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &pod.namespace);
    let services: Api<Service> = Api::namespaced(cluster.client.clone(), &service.namespace);
    let named = |kind: &str, namespace: &str, name: &str| format!("cannot read {kind} {namespace}/{name}");
    let found = within(limit, pods.get(&pod.name)).await;
    let found = found.with_context(|| named("Pod", &pod.namespace, &pod.name))?;
    let target = within(limit, services.get(&service.name)).await;
    let target = target.with_context(|| named("Service", &service.namespace, &service.name))?;
    let packet = Packet::between(&found, &target, service.port.as_deref(), args.ip_family)
        .with_context(|| format!("no packet from Pod {} to Service {}", pod.name, service.name))?;
    let node = found.spec.and_then(|spec| spec.node_name);
    let node = node.ok_or_else(|| anyhow!("Pod {} is on no node yet; wait until it runs", pod.name))?;
    Ok((node, packet))
}

/// Follows one packet from node to node; `parts` are the explanations received so far.
struct Walk<'a> {
    cluster: &'a Cluster,
    limit: Duration,
    packet: Packet,
    parts: Vec<Part>,
    /// Says which node the user waits for.
    bar: ProgressBar,
}

impl Walk<'_> {
    /// Explains the packet on each node that it passes. Returns the sentence about the result, to be printed last.
    async fn follow(&mut self, node: &str, args: &ExplainArgs) -> anyhow::Result<String> {
        let source = |ip| {
            args.client_port.map_or_else(|| format!("{ip}"), |port| SocketAddr::new(ip, port).to_string())
        };
        let (from, to) = (source(self.packet.from), self.packet.to);
        let page =
            self.ask(node, "from the Pod to the Service", (from.clone(), to), HookChoice::First).await?;
        let Some(next) = Next::of(&page, &from) else {
            return Ok(format!("The packet gets no backend on node {node}."));
        };
        let Some(backend) = next.backends.first().copied() else {
            return Ok(format!("Node {node} has no backend for the packet."));
        };
        let Some(second) = self.node_of(backend, args).await? else {
            return Ok(format!(
                "No EndpointSlice names the node of backend {backend}: the way ends on node {node}."
            ));
        };
        let is_local = second == node;
        let from = match next.is_masqueraded {
            true => self.masquerade((node, is_local), next.from, backend).await?,
            false => next.from,
        };
        if !is_local {
            let ends = (from.clone(), backend);
            self.ask(&second, "arrives at the backend's node", ends, HookChoice::First).await?;
        }
        let others = match next.backends.len() {
            1 => String::new(),
            count => format!(" It is one of {count} possible backends."),
        };
        let notice = match args.client_port {
            None => " --client-port PORT shows the way back of a connection.".to_owned(),
            Some(port) if page["verdict"] == "begins" => {
                format!(" The Pod has no connection from port {port}: this is the way of a new one.")
            }
            Some(_) => String::new(),
        };
        // A reply goes to the client's port, which is unknown without `--client-port`, and for a new connection that
        // the node masquerades.
        if let Ok(client) = from.parse::<SocketAddr>() {
            self.back((node, page["device"].as_str()), &second, backend, client).await?;
        }
        Ok(format!("Backend {backend} is on node {second}.{others}{notice}"))
    }

    /// Explains how the node masquerades a packet that leaves for the backend. Returns the source that the backend
    /// sees.
    async fn masquerade(
        &mut self,
        (node, is_local): (&str, bool),
        from: String,
        backend: SocketAddr,
    ) -> anyhow::Result<String> {
        let title = if is_local { "goes to the backend" } else { "leaves the Pod's node" };
        let client =
            from.parse().with_context(|| format!("node {node} names {from} as source of a packet"))?;
        // The packet leaves by the device through which its replies arrive.
        let reply = self.explain(node, title, (&backend.to_string(), client), HookChoice::First).await?;
        let egress = HookChoice::Egress(reply["device"].as_str());
        let page = self.ask(node, title, (from.clone(), backend), egress).await?;
        Ok(Next::of(&page, &from).map_or(from, |next| next.from))
    }

    /// Explains the backend's reply to its client: first on the backend's node, if that is not the Pod's node, then on
    /// the Pod's node. `device` is the Pod's device.
    async fn back(
        &mut self,
        (node, device): (&str, Option<&str>),
        second: &str,
        backend: SocketAddr,
        client: SocketAddr,
    ) -> anyhow::Result<()> {
        let ends = (backend.to_string(), client);
        let title = if second == node {
            "the reply leaves the backend"
        } else {
            self.ask(second, "the reply leaves the backend's node", ends.clone(), HookChoice::First).await?;
            "the reply arrives at the Pod's node"
        };
        let page = self.ask(node, title, ends.clone(), HookChoice::First).await?;
        if let Some(ends) = left_to_egress(&page, ends, self.packet.to) {
            self.ask(node, "the reply goes to the Pod", ends, HookChoice::Egress(device)).await?;
        }
        Ok(())
    }

    /// Runs `explain` on a node, and adds the answer to the parts.
    async fn ask(
        &mut self,
        node: &str,
        title: &'static str,
        (from, to): (String, SocketAddr),
        hook: HookChoice<'_>,
    ) -> anyhow::Result<Value> {
        let page = self.explain(node, title, (&from, to), hook).await?;
        self.parts.push(Part { node: node.to_owned(), title, from, to, page: page.clone() });
        Ok(page)
    }

    /// Runs `explain` on a node.
    async fn explain(
        &self,
        node: &str,
        title: &'static str,
        (from, to): (&str, SocketAddr),
        hook: HookChoice<'_>,
    ) -> anyhow::Result<Value> {
        let known = self.cluster.nodes.iter().find(|known| known.name == node);
        let known =
            known.ok_or_else(|| anyhow!("node {node} has no agent's Pod; see `kubectl lb status`"))?;
        self.bar.set_message(format!("asking node {node}: {title}"));
        let target = to.to_string();
        let mut arguments = vec![
            "explain",
            "--from",
            from,
            "--to",
            &target,
            "--protocol",
            &self.packet.protocol,
            "-o",
            "json",
        ];
        if let HookChoice::Egress(device) = hook {
            arguments.extend(["--at", "tc-egress"]);
            arguments.extend(device.iter().flat_map(|device| ["--device", device]));
        }
        let page: Value = gather::ask(self.cluster, known, &arguments, self.limit)
            .await
            .with_context(|| format!("node {node}, {title}"))?;
        let is_understood = match page["verdict"].as_str() {
            Some("translated") => page["ends"].is_object(),
            Some("begins") => page["backends"].get(0).is_none_or(|first| first["source"].is_object()),
            _ => true,
        };
        ensure!(is_understood, "the agent on node {node} is older than this plugin: update it");
        Ok(page)
    }

    /// The node of a backend, by the EndpointSlices of the Service.
    async fn node_of(&self, backend: SocketAddr, args: &ExplainArgs) -> anyhow::Result<Option<String>> {
        self.bar.set_message(format!("looking for the node of backend {backend}"));
        let service = &args.service;
        let slices: Api<EndpointSlice> = Api::namespaced(self.cluster.client.clone(), &service.namespace);
        let parameters =
            ListParams::default().labels(&format!("kubernetes.io/service-name={}", service.name));
        let listed = within(self.limit, slices.list(&parameters)).await;
        let slices = listed.with_context(|| {
            format!("cannot list the EndpointSlices of Service {}/{}", service.namespace, service.name)
        })?;
        Ok(node_in(&slices.items, backend))
    }
}

fn node_in(slices: &[EndpointSlice], backend: SocketAddr) -> Option<String> {
    let mut endpoints = slices.iter().flat_map(|slice| slice.endpoints.iter().flatten());
    let has = |address: &String| address.parse().is_ok_and(|ip: std::net::IpAddr| ip == backend.ip());
    endpoints.find(|endpoint| endpoint.addresses.iter().any(has))?.node_name.clone()
}

impl Next {
    /// Where the packet goes next, according to a node's page; `None` if the node neither begins a flow for it nor
    /// translates it.
    fn of(page: &Value, from: &str) -> Option<Self> {
        let address = |value: &Value| value.as_str()?.parse().ok();
        let steps = || page["steps"].as_array().into_iter().flatten();
        match page["verdict"].as_str()? {
            "begins" => {
                let candidates = page["backends"].as_array()?;
                let backends =
                    candidates.iter().filter_map(|candidate| address(&candidate["backend"])).collect();
                // If the node replaces the client's source, the page has only the new address: the new port is known
                // only when the flow begins.
                let other = candidates.first().and_then(|first| first["source"]["address"].as_str());
                let from = other.unwrap_or(from).to_owned();
                Some(Self { from, backends, is_masqueraded: false })
            }
            "translated" => {
                let ends = &page["ends"];
                let masquerades = |step: &Value| {
                    matches!(step["way"].as_str(), Some("masqueraded" | "caughtAndMasqueraded"))
                };
                let (from, backends) = (ends["from"].as_str()?.to_owned(), vec![address(&ends["to"])?]);
                Some(Self { from, backends, is_masqueraded: steps().any(masquerades) })
            }
            _ => None,
        }
    }
}

/// The source and destination with which a reply leaves for the Pod, if a program at the Pod's device still has to
/// replace the source by `vip`. `page` explains how the reply arrives on the Pod's node; `ends` are the source and
/// destination of the reply there.
fn left_to_egress(page: &Value, ends: (String, SocketAddr), vip: SocketAddr) -> Option<(String, SocketAddr)> {
    match page["verdict"].as_str()? {
        "untouched" if page["outcome"] == "other_hook" => Some(ends),
        "translated" => {
            let (from, to) = (page["ends"]["from"].as_str()?, page["ends"]["to"].as_str()?);
            (from.parse() != Ok(vip)).then_some((from.to_owned(), to.parse().ok()?))
        }
        _ => None,
    }
}

impl Part {
    fn text(&self) -> String {
        let Self { node, title, from, to, page } = self;
        let word = |name: &str| page[name].as_str().unwrap_or("?").to_owned();
        let device = page["device"].as_str().map_or_else(String::new, |name| format!(" of {name}"));
        let mut text = format!("Node {node}: {title}\n");
        text.push_str(&format!("{} {from} -> {to}, at {}{device}\n\n", word("protocol"), word("at")));
        for (number, step) in (1..).zip(page["steps"].as_array().into_iter().flatten()) {
            text.push_str(&format!("{number:>3}. {}\n", step["text"].as_str().unwrap_or("?")));
        }
        text.push_str(&format!("\n  => {}\n", word("text").replace('\n', "\n     ")));
        text
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{from_value, json};

    use super::*;

    fn backends(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().expect("an address")).collect()
    }

    #[test]
    fn verdict_says_where_the_packet_goes_next() {
        let next = |from: &str, texts: &[&str]| Next {
            from: from.to_owned(),
            backends: backends(texts),
            is_masqueraded: false,
        };
        let mut page = json!({"verdict": "begins", "backends": [{"backend": "10.1.0.1:80"}, {"backend": "10.1.0.2:80"}]});
        let expected = next("10.0.0.1", &["10.1.0.1:80", "10.1.0.2:80"]);
        assert_eq!(Next::of(&page, "10.0.0.1").as_ref(), Some(&expected));
        page["backends"][0]["source"] = json!({"of": "client"});
        page["backends"][1]["source"] = json!({"of": "vip", "address": "10.96.0.1"});
        assert_eq!(Next::of(&page, "10.0.0.1"), Some(expected), "the first backend sees the Pod");
        page["backends"][0]["source"] = json!({"of": "node", "address": "192.0.2.1"});
        assert_eq!(Next::of(&page, "10.0.0.1:7").map(|next| next.from).as_deref(), Some("192.0.2.1"));

        let ends = json!({"from": "192.0.2.1:10000", "to": "10.1.0.1:80"});
        let mut page =
            json!({"verdict": "translated", "ends": ends, "steps": [{"step": "flow", "way": "stack"}]});
        let mut expected = next("192.0.2.1:10000", &["10.1.0.1:80"]);
        assert_eq!(Next::of(&page, "10.0.0.1:7").as_ref(), Some(&expected));
        page["steps"][0]["way"] = "masqueraded".into();
        expected.is_masqueraded = true;
        assert_eq!(Next::of(&page, "10.0.0.1:7"), Some(expected));
        assert_eq!(Next::of(&json!({"verdict": "dropped", "outcome": "denied"}), "10.0.0.1"), None);
        assert_eq!(Next::of(&json!({}), "10.0.0.1"), None);
    }

    #[test]
    fn reply_is_followed_until_it_comes_from_the_service() {
        let vip: SocketAddr = "10.96.0.1:80".parse().expect("an address");
        let ends = ("10.1.0.1:80".to_owned(), "192.0.2.1:10000".parse().expect("an address"));
        let left =
            |page: Value| left_to_egress(&page, ends.clone(), vip).map(|(from, to)| format!("{from} {to}"));
        let translated =
            |from: &str| json!({"verdict": "translated", "ends": {"from": from, "to": "10.0.0.1:7"}});
        let untouched = |outcome: &str| json!({"verdict": "untouched", "outcome": outcome});
        assert_eq!(left(untouched("other_hook")).as_deref(), Some("10.1.0.1:80 192.0.2.1:10000"));
        assert_eq!(left(translated("10.1.0.1:80")).as_deref(), Some("10.1.0.1:80 10.0.0.1:7"));
        assert_eq!([left(untouched("no_service")), left(translated("10.96.0.1:80"))], [None, None]);
    }

    #[test]
    fn endpoint_slices_name_the_node_of_a_backend() {
        let slice: EndpointSlice = from_value(json!({
            "metadata": {}, "addressType": "IPv6",
            "endpoints": [
                {"addresses": ["fd00:0::1"], "nodeName": "a"}, {"addresses": ["fd00::2"], "nodeName": "b"},
                {"addresses": ["fd00::3"]},
            ],
        }))
        .expect("an EndpointSlice");
        let node = |text: &str| node_in(std::slice::from_ref(&slice), text.parse().expect("an address"));
        assert_eq!(node("[fd00::1]:80").as_deref(), Some("a"));
        assert_eq!(node("[fd00::2]:80").as_deref(), Some("b"));
        assert_eq!((node("[fd00::3]:80"), node("[fd00::4]:80")), (None, None));
    }
}
