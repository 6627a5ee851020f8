// Resources of an Azure resource group for onnx-ops. onnx-ops itself creates endpoints and deployments.
// az deployment group create --resource-group ml --template-file infra/azure/onnx-ops.bicep --parameters repository=OWNER/NAME

@description('Region of all resources.')
param location string = resourceGroup().location

@description('Prefix of names: lower-case letters and digits.')
@minLength(3)
@maxLength(10)
param prefix string = 'onnxops'

@description('OWNER/NAME of the GitHub repository whose workflows release.')
param repository string

@description('Environment of the jobs that release and promote. Azure trusts no job outside these two environments.')
param environmentName string = 'production'

@description('Environment of the job that rolls back. Give it no required reviewers, so that rollbacks start fast.')
param rollbackEnvironmentName string = 'rollback'

var unique = uniqueString(resourceGroup().id)
var roles = {
  blobContributor: 'ba92f5b4-2d11-453d-a403-e96b0029c9fe'
  blobReader: '2a2b9908-6ea1-4ae2-8e65-a410df84e7d1'
  pull: '7f951dda-4ed3-4680-a7ca-43fe172d538d'
}

resource storage 'Microsoft.Storage/storageAccounts@2023-05-01' = {
  name: '${prefix}${unique}'
  location: location
  kind: 'StorageV2'
  sku: {
    name: 'Standard_LRS'
  }
  properties: {
    allowBlobPublicAccess: false
    minimumTlsVersion: 'TLS1_2'
    supportsHttpsTrafficOnly: true
  }
}

resource versions 'Microsoft.Storage/storageAccounts/blobServices@2023-05-01' = {
  parent: storage
  name: 'default'
  properties: {
    isVersioningEnabled: true
    deleteRetentionPolicy: {
      enabled: true
      days: 30
    }
  }
}

// Tables and models of endpoints with `traffic: table`. Their instances only read them.
resource control 'Microsoft.Storage/storageAccounts/blobServices/containers@2023-05-01' = {
  parent: versions
  name: 'control'
}

// Reports of these instances, which they write every few seconds.
resource reports 'Microsoft.Storage/storageAccounts/blobServices/containers@2023-05-01' = {
  parent: versions
  name: 'reports'
}

// Old versions of reports are deleted, because nothing reads them.
resource lifecycle 'Microsoft.Storage/storageAccounts/managementPolicies@2023-05-01' = {
  parent: storage
  name: 'default'
  properties: {
    policy: {
      rules: [
        {
          enabled: true
          name: 'reports'
          type: 'Lifecycle'
          definition: {
            actions: {
              version: {
                delete: {
                  daysAfterCreationGreaterThan: 1
                }
              }
            }
            filters: {
              blobTypes: [
                'blockBlob'
              ]
              prefixMatch: [
                'reports/'
              ]
            }
          }
        }
      ]
    }
  }
}

resource vault 'Microsoft.KeyVault/vaults@2023-07-01' = {
  name: '${prefix}${unique}'
  location: location
  properties: {
    tenantId: subscription().tenantId
    enableRbacAuthorization: true
    enablePurgeProtection: true
    sku: {
      family: 'A'
      name: 'standard'
    }
  }
}

resource insights 'Microsoft.Insights/components@2020-02-02' = {
  name: '${prefix}-insights'
  location: location
  kind: 'web'
  properties: {
    Application_Type: 'web'
  }
}

resource registry 'Microsoft.ContainerRegistry/registries@2023-07-01' = {
  name: '${prefix}${unique}'
  location: location
  sku: {
    name: 'Basic'
  }
  properties: {
    adminUserEnabled: false
  }
}

resource workspace 'Microsoft.MachineLearningServices/workspaces@2024-04-01' = {
  name: '${prefix}-workspace'
  location: location
  identity: {
    type: 'SystemAssigned'
  }
  properties: {
    storageAccount: storage.id
    keyVault: vault.id
    applicationInsights: insights.id
    containerRegistry: registry.id
  }
}

// Identity that runs onnx-ops: that of the reconciler's machine and of the workflows.
resource operator 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' = {
  name: '${prefix}-operator'
  location: location
}

// Identity of the endpoints; the option `identity`.
resource serving 'Microsoft.ManagedIdentity/userAssignedIdentities@2023-01-31' = {
  name: '${prefix}-serving'
  location: location
}

resource github 'Microsoft.ManagedIdentity/userAssignedIdentities/federatedIdentityCredentials@2023-01-31' = {
  parent: operator
  name: 'github'
  properties: {
    issuer: 'https://token.actions.githubusercontent.com'
    subject: 'repo:${repository}:environment:${environmentName}'
    audiences: [
      'api://AzureADTokenExchange'
    ]
  }
}

// Azure adds credentials to an identity one after the other, so this one depends on the first.
resource githubRollback 'Microsoft.ManagedIdentity/userAssignedIdentities/federatedIdentityCredentials@2023-01-31' = {
  parent: operator
  name: 'github-rollback'
  dependsOn: [
    github
  ]
  properties: {
    issuer: 'https://token.actions.githubusercontent.com'
    subject: 'repo:${repository}:environment:${rollbackEnvironmentName}'
    audiences: [
      'api://AzureADTokenExchange'
    ]
  }
}

// Permissions of the provider in the workspace. A test compares its requests with these permissions.
resource releaser 'Microsoft.Authorization/roleDefinitions@2022-04-01' = {
  name: guid(resourceGroup().id, 'onnx-ops-releaser')
  properties: {
    roleName: '${prefix} releaser'
    description: 'Endpoints, deployments, models and environments of a workspace, and their metrics.'
    type: 'CustomRole'
    assignableScopes: [
      resourceGroup().id
    ]
    permissions: [
      {
        actions: [
          'Microsoft.Authorization/permissions/read'
          'Microsoft.Insights/metrics/read'
          'Microsoft.MachineLearningServices/workspaces/read'
          'Microsoft.MachineLearningServices/workspaces/datastores/read'
          'Microsoft.MachineLearningServices/workspaces/environments/versions/read'
          'Microsoft.MachineLearningServices/workspaces/environments/versions/write'
          'Microsoft.MachineLearningServices/workspaces/models/versions/read'
          'Microsoft.MachineLearningServices/workspaces/models/versions/write'
          'Microsoft.MachineLearningServices/workspaces/onlineEndpoints/read'
          'Microsoft.MachineLearningServices/workspaces/onlineEndpoints/write'
          'Microsoft.MachineLearningServices/workspaces/onlineEndpoints/delete'
          'Microsoft.MachineLearningServices/workspaces/onlineEndpoints/deployments/read'
          'Microsoft.MachineLearningServices/workspaces/onlineEndpoints/deployments/write'
          'Microsoft.MachineLearningServices/workspaces/onlineEndpoints/deployments/delete'
        ]
      }
    ]
  }
}

// Permissions in the resource group: to assign the identity of the endpoints, to configure autoscaling, and to let
// `doctor` check whether this identity can pull the image.
resource groupAccess 'Microsoft.Authorization/roleDefinitions@2022-04-01' = {
  name: guid(resourceGroup().id, 'onnx-ops-group-access')
  properties: {
    roleName: '${prefix} group access'
    description: 'Assign identities of the resource group, scale deployments, and read role assignments.'
    type: 'CustomRole'
    assignableScopes: [
      resourceGroup().id
    ]
    permissions: [
      {
        actions: [
          'Microsoft.Authorization/roleAssignments/read'
          'Microsoft.Insights/autoscaleSettings/read'
          'Microsoft.Insights/autoscaleSettings/write'
          'Microsoft.Insights/autoscaleSettings/delete'
          'Microsoft.ManagedIdentity/userAssignedIdentities/read'
          'Microsoft.ManagedIdentity/userAssignedIdentities/assign/action'
        ]
      }
    ]
  }
}

resource releases 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(workspace.id, operator.id, releaser.id)
  scope: workspace
  properties: {
    principalId: operator.properties.principalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: releaser.id
  }
}

resource accessesGroup 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(resourceGroup().id, operator.id, groupAccess.id)
  properties: {
    principalId: operator.properties.principalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: groupAccess.id
  }
}

// Write access to the whole account: models of `traffic: native`, and the containers `control` and `reports`.
resource uploads 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(storage.id, operator.id, roles.blobContributor)
  scope: storage
  properties: {
    principalId: operator.properties.principalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', roles.blobContributor)
  }
}

// Read access to the models of `traffic: native`, which are in a container of the workspace.
resource downloads 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(storage.id, serving.id, roles.blobReader)
  scope: storage
  properties: {
    principalId: serving.properties.principalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', roles.blobReader)
  }
}

resource follows 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(control.id, serving.id, roles.blobReader)
  scope: control
  properties: {
    principalId: serving.properties.principalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', roles.blobReader)
  }
}

resource writesReports 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(reports.id, serving.id, roles.blobContributor)
  scope: reports
  properties: {
    principalId: serving.properties.principalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', roles.blobContributor)
  }
}

resource pulls 'Microsoft.Authorization/roleAssignments@2022-04-01' = {
  name: guid(registry.id, serving.id, roles.pull)
  scope: registry
  properties: {
    principalId: serving.properties.principalId
    principalType: 'ServicePrincipal'
    roleDefinitionId: subscriptionResourceId('Microsoft.Authorization/roleDefinitions', roles.pull)
  }
}

output workspace string = workspace.name
output clientId string = operator.properties.clientId
output identity string = serving.id
output servingClientId string = serving.properties.clientId
output control string = 'abfs://control@${storage.name}.dfs.${environment().suffixes.storage}'
output reports string = 'abfs://reports@${storage.name}.dfs.${environment().suffixes.storage}'
output registry string = registry.properties.loginServer
