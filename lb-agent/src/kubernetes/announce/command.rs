//! `lb-agent announce voters`: lists the nodes that vote on announcements, as the API server has them. With
//! `--replace`, it removes all voters, unless a majority of them have Node objects and are not named by
//! `--without-agent`.

use std::collections::BTreeSet;

use anyhow::{Context as _, anyhow, bail};
use k8s_openapi::api::core::v1 as core;
use kube::{
    Api, Client,
    api::{ListParams, PostParams},
};
use lb_core::announce::voters::Voters;

use super::{
    super::client::{ApiServer, client_config, own_namespace},
    VOTERS, kinds,
};

/// The ConfigMap of voters as the API server has it, and what is needed to replace it.
#[derive(Debug)]
pub struct VotersObject {
    config_maps: Api<core::ConfigMap>,
    version: Option<String>,
    /// The voters that the ConfigMap names.
    pub voters: Voters,
    /// The names of all Nodes in the cluster.
    pub nodes: BTreeSet<String>,
}

impl VotersObject {
    /// Reads the voters and the Nodes.
    ///
    /// # Errors
    ///
    /// The API server does not answer, refuses a request, or has no readable ConfigMap of voters.
    pub async fn read(server: ApiServer) -> anyhow::Result<Self> {
        let config = client_config(server).await?;
        let namespace = own_namespace(&config).await;
        let client = Client::try_from(config)?;
        let nodes = Api::<core::Node>::all(client.clone()).list_metadata(&ListParams::default()).await;
        let nodes = nodes.context("cannot list Nodes")?.items.into_iter();
        let config_maps: Api<core::ConfigMap> = Api::namespaced(client, &namespace);
        // Lists one object by its name: the role of the agents lets them list this ConfigMap, not get it.
        let named = ListParams::default().fields(&format!("metadata.name={VOTERS}"));
        let found = config_maps.list(&named).await;
        let found = found.with_context(|| format!("cannot read the ConfigMap {namespace}/{VOTERS}"))?;
        let object = found.items.into_iter().next().with_context(|| {
            format!(
                "there is no ConfigMap {namespace}/{VOTERS}: agents write it once an L2Advertisement exists"
            )
        })?;
        let voters = kinds::voters(&object.data.unwrap_or_default()).map_err(|field| {
            anyhow!(
                "data.{field} of the ConfigMap {namespace}/{VOTERS} is not what agents write; they replace it"
            )
        })?;
        let nodes = nodes.filter_map(|node| node.metadata.name).collect();
        Ok(Self { config_maps, version: object.metadata.resource_version, voters, nodes })
    }

    /// Removes all voters. Then an agent whose Node exists writes that Node as the first new voter. `without_agent` are
    /// voters whose Nodes exist, but run no agent any more.
    ///
    /// # Errors
    ///
    /// A name is not that of a voter, a majority of the voters have Node objects and are not in `without_agent`, the
    /// voters have the last possible generation, or the API server refuses the change.
    pub async fn replace(self, without_agent: &[String]) -> anyhow::Result<()> {
        let is_named = |name: &str| without_agent.iter().any(|named| named == name);
        if let Some(other) = without_agent.iter().find(|named| !self.voters.names.contains(named.as_str())) {
            bail!("{other} is no voter: nothing is changed; `lb-agent announce voters` lists the voters");
        }
        if self.voters.lost(|name| self.nodes.contains(name) && !is_named(name)).is_empty() {
            bail!(
                "a majority of the voters has Nodes, so the agents replace the others: nothing is changed; delete the Nodes of \
                 machines that are gone, and name Nodes that run no agent any more by --without-agent"
            );
        }
        let vacated = self.voters.vacated().context("the generation of the voters is the last one")?;
        let object = kinds::object(&vacated, self.version);
        let replaced = self.config_maps.replace(VOTERS, &PostParams::default(), &object).await;
        replaced
            .map(drop)
            .with_context(|| format!("cannot write the ConfigMap {VOTERS}; run the command again"))
    }
}
